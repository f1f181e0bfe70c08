"""Arguments of `save` that are refused, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    read_start,
)
from parallel_config import Topology
from small_runs import NOTES, ONE, saver_of, small


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7])
def test_an_integer_of_any_library_is_a_step(step: Any, tmp_path: Path) -> None:
    for async_save in (False, True):
        with saver_of(tmp_path, async_save=async_save) as saver:
            path = saver.save(step=step, samples_seen=step, model=small()[0])
        assert path == tmp_path / "checkpoints/000007"
        start = read_start(path, topology=ONE)
        assert (start.step, start.samples_seen) == (7, 7)


@pytest.mark.parametrize("wrong", [-1, True, 1.0, "1", None, 2**62, np.bool_(True)])
@pytest.mark.parametrize("name", ["step", "samples_seen"])
def test_what_counts_nothing_is_refused(name: str, wrong: Any, tmp_path: Path) -> None:
    with saver_of(tmp_path) as saver:
        with pytest.raises(CheckpointError) as caught:
            saver.save(**{"step": 1, "samples_seen": 1, "model": small()[0], name: wrong})
        assert (
            str(caught.value)
            == f"{name} = {wrong!r}, but it must be an integer from 0 to 2^62 - 1."
        )
        assert not list((tmp_path / "checkpoints").iterdir())


def test_a_manifest_that_no_reader_accepts_is_never_committed(tmp_path: Path) -> None:
    topology = Topology()
    object.__setattr__(topology, "dp_shard", 1.0)
    with (
        CheckpointSaver(tmp_path, topology=topology, on_note=NOTES.append) as saver,
        pytest.raises(CheckpointError, match=r"topology\.dp_shard = 1\.0"),
    ):
        saver.save(step=1, samples_seen=1, model=small()[0])
    assert not list((tmp_path / "checkpoints").iterdir())


class Misfit(nn.Module):
    def get_extra_state(self) -> Any:
        return object()


def test_what_could_only_be_pickled_is_refused_at_the_first_save(tmp_path: Path) -> None:
    model, optimizer = small()
    with saver_of(tmp_path) as saver:
        with pytest.raises(CheckpointError, match="keeps extra state"):
            saver.save(step=1, samples_seen=0, model=nn.Sequential(Misfit()))
        optimizer.param_groups[0]["hook"] = object()
        with pytest.raises(
            CheckpointError, match=r"optimizer\.groups\[0\]\.hyper\.hook is a object"
        ):
            saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
        with pytest.raises(CheckpointError, match="data_state"):
            saver.save(step=1, samples_seen=0, model=model, data_state={"at": {1, 2}})
    assert not list((tmp_path / "checkpoints").iterdir())
