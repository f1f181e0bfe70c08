"""A save in the background keeps its moment, and its error is raised."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    load_weights,
)
from parallel_config import CheckpointConfig, CheckpointFormat
from small_runs import ONE, saver_of, small, train


def test_a_save_in_flight_keeps_its_values(tmp_path: Path) -> None:
    model, optimizer = small()
    wanted = {}
    with CheckpointSaver(
        tmp_path,
        topology=ONE,
        checkpoint_format=CheckpointFormat.DCP,
        config=CheckpointConfig(async_save=True),
    ) as saver:
        for step in range(1, 6):
            train(model, optimizer)
            wanted[step] = [p.detach().clone() for p in model.parameters()]
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
    for step, expected in wanted.items():
        other, _ = small()
        load_weights(other, tmp_path / f"checkpoints/{step:06d}")
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected, strict=True))


def test_tensors_on_the_host_start_no_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with GPUs, where every rank of a CPU run would hold memory of the first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, optimizer = small()
    with saver_of(tmp_path, async_save=True) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    assert not torch.cuda.is_initialized()


def test_a_failed_background_save_is_heard_of(tmp_path: Path) -> None:
    model, optimizer = small()
    saver = saver_of(tmp_path, async_save=True)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="checkpoints"):
        saver.wait()
    saver.close()
