"""Only files that the manifest lists are read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from parallel_ckpt import (
    CheckpointSaver,
    DamagedCheckpoint,
    load_weights,
    read_start,
    restore,
)
from parallel_ckpt.convert import convert
from parallel_ckpt.inspect import inspect
from parallel_ckpt.verify import verify
from parallel_config import CheckpointFormat
from small_runs import ONE, build, change_manifest, quiet, train_on


def saved(run: Path, form: CheckpointFormat) -> tuple[nn.Module, Path]:
    model, optimizer = build()
    train_on(model, optimizer, 0)
    with CheckpointSaver(run, topology=ONE, checkpoint_format=form, on_note=quiet) as saver:
        path = saver.save(
            step=1, samples_seen=0, model=model, optimizer=optimizer, train_config="{}"
        )
    return model, path


@pytest.mark.parametrize("form", CheckpointFormat)
@pytest.mark.parametrize("name", ["model-old.safetensors", "model.safetensors", "model"])
def test_a_file_that_was_never_committed_is_read_by_nothing(
    name: str, form: CheckpointFormat, tmp_path: Path
) -> None:
    model, path = saved(tmp_path / "run", form)
    folder = path / "pretrained_model"
    if (folder / name).exists():
        name = "model-00001-of-00002.safetensors"
    zeros = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    if name == "model":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "y"}}')
        name += ".safetensors.index.json"
    else:
        save_file(zeros, folder / name)
    before = inspect(path).to_plain()
    read_start(path, topology=ONE)
    assert verify(path).unlisted == (f"pretrained_model/{name}",)
    other, fresh = build()
    restore(path, other, fresh)
    assert torch.equal(other[1].weight, model[1].weight)
    for given in (tmp_path / "run", path, folder, folder / "dcp"):
        if given.exists():
            load_weights(other := build()[0], given)
            assert torch.equal(other[1].weight, model[1].weight), given
    convert(path, tmp_path / "out")
    load_weights(other := build()[0], tmp_path / "out")
    assert torch.equal(other[1].weight, model[1].weight)
    (folder / name).unlink()
    assert inspect(path).to_plain() == before


@pytest.mark.parametrize(
    ("gone", "is_told"),
    [
        ("pretrained_model/dcp/.metadata", True),
        ("pretrained_model/dcp/__0_0.distcp", True),
        ("training_state/optimizer/.metadata", True),
        ("training_state/optimizer/__0_0.distcp", True),
        ("training_state/optimizer.json", True),
        ("training_state/training_step.json", True),
        ("training_state/data.json", True),
        ("training_state/rng/rank_00000.safetensors", True),
        ("pretrained_model/train_config.json", False),
    ],
)
def test_a_file_that_the_manifest_lost_is_not_read(
    gone: str, is_told: bool, tmp_path: Path
) -> None:
    _, path = saved(tmp_path, CheckpointFormat.DCP)
    document = json.loads((path / "manifest.json").read_text())
    files = [record for record in document["files"] if record["path"] != gone]
    change_manifest(path, files=files)
    told = pytest.raises(DamagedCheckpoint, match=r"is needed, but manifest\.json does not list it")
    with told if is_told else contextlib.nullcontext():
        start = read_start(path, topology=ONE)
        assert is_told or start.train_config is None
        restore(path, *build())
