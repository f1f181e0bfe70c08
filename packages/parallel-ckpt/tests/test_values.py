"""What comes back is what was saved: wrapped models, plain values, random streams, any tensor."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel_ckpt import (
    load_weights,
    restore,
    save_weights,
)
from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.limits import MAX_DEPTH, MAX_INT_BITS
from parallel_ckpt.state.plain_json import dump_json, load_json
from parallel_ckpt.state.rng import RngState
from small_runs import saver_of, small, train


class Prepared(torch.optim.Optimizer):
    """Wraps an optimizer the way accelerate does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.scaler = optimizer, torch.amp.GradScaler("cpu", init_scale=8.0)


class PreparedSchedule:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler


def test_wrappers_of_model_and_optimizer_leave_no_trace(tmp_path: Path) -> None:
    model, optimizer = small()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    model[0] = checkpoint_wrapper(model[0])
    compiled = torch.compile(model, backend="eager")
    train(compiled, optimizer)
    schedule.step()
    prepared = Prepared(optimizer)
    with saver_of(tmp_path) as saver:
        saver.save(
            step=1,
            samples_seen=2,
            model=compiled,
            optimizer=prepared,
            scheduler=PreparedSchedule(schedule),
        )
    with safe_open(tmp_path / "checkpoints/last/pretrained_model/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    plain, other = small()
    again = torch.optim.lr_scheduler.MultiStepLR(other, [1, 3])
    target = Prepared(other)
    target.scaler.load_state_dict(target.scaler.state_dict() | {"scale": 2.0})
    restore(tmp_path, plain, target, PreparedSchedule(again))
    assert torch.equal(plain[0].weight, model[0].weight)
    assert again.state_dict() == schedule.state_dict()
    assert isinstance(again.milestones, Counter)
    assert target.scaler.state_dict()["scale"] == 8.0


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x"], "b": (1, (2,))},
        {1: "int key", "$tuple": "odd key"},
        Counter({3: 2}),
        [float("inf"), -float("inf")],
        1e-300,
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = load_json(dump_json(value, "v"), "v")
    assert found == value
    assert type(found) is type(value)


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 7
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS = [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}]


@pytest.mark.parametrize("wrap", WRAPS, ids=["list", "tuple", "dict", "odd keys"])
def test_what_a_document_takes_its_reader_takes_and_one_level_more_is_refused(wrap: Any) -> None:
    deepest = nested(MAX_DEPTH, wrap)
    assert load_json(dump_json(deepest, "data_state"), "data_state") == deepest
    with pytest.raises(CheckpointError, match=f"lies in more than {MAX_DEPTH} lists"):
        dump_json(wrap(deepest), "data_state")


def test_a_list_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="lies in more than"):
        dump_json(value, "data_state")


@pytest.mark.parametrize("value", [{"a": "x\ud800"}, {"\ud800": 1}, {1: ["\udfff"]}])
def test_half_a_character_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"data_state.* half of a character"):
        dump_json(value, "data_state")


def test_integers_come_back_up_to_the_limit() -> None:
    largest = 2**MAX_INT_BITS - 1
    assert load_json(dump_json(-largest, "n"), "n") == -largest
    with pytest.raises(CheckpointError, match="n is an integer of 10001 bits, but 10000 are kept"):
        dump_json(largest + 1, "n")


def test_random_streams_go_on_where_they_were() -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    state = RngState.capture()

    def draw() -> list[float]:
        numpy = [float(np.random.standard_normal()) for _ in range(3)]
        return [*(random.gauss(0, 1) for _ in range(3)), *numpy, float(torch.rand(()))]

    first = draw()
    draw()
    state.restore()
    assert draw() == first


def test_weights_of_every_sort(tmp_path: Path) -> None:
    model = nn.Module()
    model.across = nn.Parameter(torch.randn(6, 8).t())
    model.narrow = nn.Parameter(torch.randn(3).bfloat16())
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("one", torch.tensor(7))
    save_weights(model, tmp_path / "one")
    files = save_weights(model, tmp_path / "many", max_shard_bytes=64)
    assert "model.safetensors.index.json" in files
    for name in ("one", "many"):
        target = nn.Module()
        for key, value in model.state_dict().items():
            target.register_buffer(key, torch.zeros_like(value.contiguous()))
        assert load_weights(target, tmp_path / name) == 5
        for key, value in model.state_dict().items():
            assert torch.equal(target.state_dict()[key], value)
            assert target.state_dict()[key].dtype == value.dtype
