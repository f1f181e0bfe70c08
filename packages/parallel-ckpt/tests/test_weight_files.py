"""One rule says what a weight file is: by it weights are saved, loaded, converted and published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_ckpt import load_weights, save_weights
from parallel_ckpt.convert import convert
from parallel_ckpt.layout import belongs_to_weights, is_weight_file


@pytest.mark.parametrize(
    ("name", "holds_tensors", "is_reserved"),
    [
        ("model.safetensors", True, True),
        ("model-00002-of-00003.safetensors", True, True),
        ("model.safetensors.index.json", False, True),
        ("model_ema.safetensors", False, False),
        ("model-old.safetensors", False, False),
        ("preprocessor.safetensors", False, False),
        ("nested/model.safetensors", False, False),
    ],
)
def test_a_weight_file_is_known_by_its_name(
    name: str, holds_tensors: bool, is_reserved: bool
) -> None:
    assert is_weight_file(name) == holds_tensors
    assert belongs_to_weights(name) == is_reserved


def test_an_average_beside_the_weights_is_not_read_as_weights(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    save_weights(model, tmp_path / "model")
    average = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    save_file(average, tmp_path / "model" / "model_ema.safetensors")
    load_weights(other, tmp_path / "model")
    assert torch.equal(other.weight, model.weight)
    result = convert(tmp_path / "model", tmp_path / "out", dtype="bf16")
    assert list(result.files) == ["model.safetensors"]
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(converted["weight"], model.weight.to(torch.bfloat16))
    assert torch.equal(
        load_file(tmp_path / "out" / "model_ema.safetensors")["weight"], average["weight"]
    )


def test_a_folder_without_a_weight_file_by_name_is_read_whole(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    for name, value in model.state_dict().items():
        save_file({name: value}, tmp_path / f"part_{name}.safetensors")
    load_weights(other, tmp_path)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
