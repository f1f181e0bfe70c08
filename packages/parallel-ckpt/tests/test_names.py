"""Names are the user's own: a wrapper's part goes because of the wrapper (decision 0011)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

from parallel_ckpt import CheckpointError, CheckpointSaver, load_weights, restore
from parallel_ckpt.convert import convert
from parallel_ckpt.formats.safetensors import read_header
from parallel_ckpt.state.model import aliases, named_tensors, parameter_names
from parallel_config import CheckpointFormat, Topology

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LOOKALIKES = ["module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"]


class Root(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def saved(model: nn.Module, run: Path, form: str = "dcp") -> Path:
    with CheckpointSaver(
        run, topology=Topology(), checkpoint_format=CheckpointFormat(form)
    ) as saver:
        return saver.save(step=1, samples_seen=1, model=model)


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_child_that_is_called_as_a_wrapper_calls_its_own_keeps_its_name(
    name: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        inner = Root(**{name: nn.Linear(2, 3), "down": Root(**{name: nn.Linear(2, 3)})})
        return Root(**{name: inner})

    model = build()
    names = [n for n, _ in model.named_parameters()]
    assert list(named_tensors(model)) == names
    assert list(parameter_names(model).values()) == names
    path = saved(model, tmp_path / "run")
    convert(path)
    assert set(read_header(path / "pretrained_model" / "model.safetensors").tensors) == set(names)
    convert(path, tmp_path / "out")
    for source in (path, path / "pretrained_model" / "dcp", tmp_path / "out"):
        load_weights(loaded := build(), source)
        for own, other in zip(model.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(own, other)
    restore(path, build())


def test_two_children_that_were_one_name_stay_two(tmp_path: Path) -> None:
    model = Root(
        down=nn.Linear(2, 2, bias=False),
        _checkpoint_wrapped_module=Root(down=nn.Linear(2, 2, bias=False)),
    )
    assert list(named_tensors(model)) == ["down.weight", "_checkpoint_wrapped_module.down.weight"]
    path = saved(model, tmp_path, "safetensors")
    load_weights(other := Root(**dict(model.named_children())), path)
    assert len(list(other.parameters())) == 2


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        checkpoint_wrapper,
        offload_wrapper,
        torch.compile,
        lambda m: torch.compile(checkpoint_wrapper(m)),
        lambda m: checkpoint_wrapper(torch.compile(m)),
        nn.DataParallel,
    ],
    ids=["bare", "checkpoint", "offload", "compile", "compile-checkpoint", "both", "dp"],
)
def test_what_a_wrapper_adds_goes(wrap) -> None:  # type: ignore[no-untyped-def]
    inner = Root(module=nn.Linear(2, 2), norm=nn.BatchNorm1d(2))
    expected = [n for n, _ in inner.named_parameters()]
    buffers = [n for n, _ in inner.named_buffers()]
    wrapped = Root(a=wrap(inner))
    assert list(named_tensors(wrapped)) == [f"a.{n}" for n in expected + buffers]
    assert list(named_tensors(wrap(inner))) == expected + buffers


def test_a_tied_tensor_has_all_its_names_below_a_wrapper() -> None:
    inner = Root(one=nn.Linear(2, 2, bias=False), module=nn.Linear(2, 2, bias=False))
    inner.one.weight = inner.module.weight
    assert aliases(Root(a=checkpoint_wrapper(inner))) == {"a.module.weight": "a.one.weight"}
    shared = nn.Linear(2, 2, bias=False)
    assert aliases(Root(a=shared, b=checkpoint_wrapper(shared))) == {"b.weight": "a.weight"}


def test_a_wrapper_with_a_tensor_of_its_own_is_refused(tmp_path: Path) -> None:
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    wrapped._buffers["weight"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=r"model\.a\.weight is the name of two tensors"):
        saved(Root(a=wrapped), tmp_path)


@pytest.mark.parametrize("root", ["", "model"])
def test_names_are_guessed_in_another_writers_folder_alone(root: str, tmp_path: Path) -> None:
    weights = {f"module._orig_mod.{n}": p for n, p in nn.Linear(2, 3).state_dict().items()}
    state = {root: weights} if root else weights
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "out")
    found = read_header(tmp_path / "out" / "model.safetensors").tensors
    assert set(found) == {"weight", "bias"}


def test_weights_on_top_beside_a_nested_optimizer_are_the_model(tmp_path: Path) -> None:
    """As torchtitan saves: the model's keys on top, everything else below keys of its own."""
    model = {"tok_embeddings.weight": torch.ones(2, 3), "layers.0.wq.weight": torch.ones(3)}
    state = {
        **model,
        "optimizer": {f"state.{name}.exp_avg": value * 2 for name, value in model.items()},
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    result = convert(tmp_path / "dcp", tmp_path / "out")
    found = read_header(tmp_path / "out" / "model.safetensors").tensors
    assert set(found) == set(model)
    assert {key.split(".")[0] for key in result.left_out} == {
        "optimizer",
        "lr_scheduler",
        "train_state",
    }
    dcp.save({"optimizer": state["optimizer"]}, checkpoint_id=tmp_path / "o", no_dist=True)
    with pytest.raises(CheckpointError, match="optimizer state, not weights"):
        convert(tmp_path / "o", tmp_path / "out2")
