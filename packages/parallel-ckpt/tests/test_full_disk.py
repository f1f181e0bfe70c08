"""A disk that is full, or may not be written, is an error on every rank and costs no checkpoint."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    RunFolder,
)
from parallel_ckpt.verify import verify
from parallel_config import CheckpointFormat, Topology, is_agreed
from parallel_testing.ranks import run_ranks
from small_runs import build, quiet, train_on

TWO = Topology(dp_shard=2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 kB, mounted for this test alone."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here; RLIMIT_FSIZE stands in elsewhere")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_the_disk(run: Path, form: CheckpointFormat) -> list[str]:
    """Save until the disk is full; what each rank was told."""
    model, optimizer = build(64)
    train_on(model, optimizer, 0, 64)
    told = []
    with CheckpointSaver(run, topology=TWO, checkpoint_format=form, on_note=quiet) as saver:
        for step in range(1, 8):
            begin = time.monotonic()
            try:
                saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
            except CheckpointError as error:
                told.append(f"{step} {error}{'' if is_agreed(error) else ' (on one rank)'}")
            assert time.monotonic() - begin < 30
    return told


@pytest.mark.parametrize("form", CheckpointFormat)
def test_a_full_disk_is_told_on_every_rank_and_costs_no_checkpoint(
    form: CheckpointFormat, small_disk: Path
) -> None:
    told = run_ranks(fill_the_disk, 2, small_disk / "run", form)
    assert told[0] == told[1]
    assert told[0]
    assert all("No space left on device" in line for line in told[0])
    assert "on one rank" not in str(told)  # no engine tells anybody of it once more
    folder = RunFolder(small_disk / "run")
    steps = folder.committed_steps()
    assert steps
    assert not folder.hidden_folders()
    assert not {int(line.split()[0]) for line in told[0]} & set(steps)
    for step in steps:
        assert verify(folder.step(step).path).ok
    assert os.readlink(folder.last) == f"{steps[-1]:06d}"


def refuse_the_main_rank(run: Path, where: str) -> str:
    """The main rank alone may not write where only it writes."""
    model, optimizer = build()
    with CheckpointSaver(run, topology=TWO, on_note=quiet) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
        if dist.get_rank() == 0 and where == "checkpoints":
            os.chmod(run / "checkpoints", 0o500)
            os.seteuid(65534)
        files = {"config.json": ""} if where == "checkpoints" else {300 * "x": ""}
        try:
            saver.save(step=2, samples_seen=0, model=model, optimizer=optimizer, model_files=files)
        except CheckpointError as error:
            return str(error)
        finally:
            os.seteuid(os.getuid())
    return ""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("checkpoints", "failed on rank 0: Permission denied"),
        ("name", "failed on rank 0: File name too long"),
    ],
)
def test_an_error_where_only_the_main_rank_writes(where: str, words: str, tmp_path: Path) -> None:
    if where == "checkpoints" and os.geteuid() != 0:
        pytest.skip("only root can give up a right and take it back")
    told = run_ranks(refuse_the_main_rank, 2, tmp_path, where)
    os.chmod(tmp_path / "checkpoints", 0o700)
    assert words in told[0]
    assert told[0] == told[1]
    assert RunFolder(tmp_path).committed_steps() == [1]
    assert not RunFolder(tmp_path).hidden_folders()
