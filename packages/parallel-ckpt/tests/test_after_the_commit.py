"""Once a checkpoint is committed nothing makes its save fail: listeners, notes, deletions."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from parallel_ckpt import (
    CheckpointSaver,
    read_start,
    resolve_checkpoint,
)
from parallel_ckpt.layout import RunFolder
from parallel_config import CheckpointConfig, Topology
from parallel_testing.ranks import run_ranks
from small_runs import ONE, read_manifest_of, saver_of, small

TWO = Topology(dp_replicate=2)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_commit_is_told_before_anything_is_deleted(tmp_path: Path, async_save: bool) -> None:
    model, optimizer = small()
    seen: list[tuple[str, list[int]]] = []

    def on_commit(path: Path) -> None:
        seen.append((path.name, RunFolder(tmp_path).committed_steps()))

    config = CheckpointConfig(keep_last=1, async_save=async_save)
    with CheckpointSaver(tmp_path, topology=ONE, config=config, on_commit=on_commit) as saver:
        for step in (1, 2):
            saver.save(step=step, samples_seen=step, model=model, optimizer=optimizer)
    assert seen == [("000001", [1]), ("000002", [1, 2])]
    assert RunFolder(tmp_path).committed_steps() == [2]


@pytest.mark.parametrize("async_save", [False, True])
def test_what_fails_after_the_commit_is_a_note(tmp_path: Path, async_save: bool) -> None:
    model, _ = small()
    notes: list[str] = []

    def on_commit(path: Path) -> None:
        raise RuntimeError("the Hub is down")

    config = CheckpointConfig(keep_last=1, async_save=async_save)
    with CheckpointSaver(
        tmp_path, topology=ONE, config=config, on_note=notes.append, on_commit=on_commit
    ) as saver:
        for step in (2, 3, 1):
            saver.save(step=step, samples_seen=0, model=model)
        saver.wait()
        assert RunFolder(tmp_path).committed_steps() == [1]
        assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoints/000001"
        assert read_manifest_of(tmp_path).sequence == 3
    assert notes[2] == (
        f"{tmp_path}/checkpoints/000001: saved; on_commit failed: RuntimeError: the Hub is down"
    )
    assert len(notes) == 3


def save_with_a_slow_listener(run: Path) -> tuple[list[str], list[str]]:
    saved: list[str] = []
    notes: list[str] = []

    def on_commit(path: Path) -> None:
        if path.name == "000001":
            time.sleep(4.0)

    with CheckpointSaver(
        run, topology=TWO, on_note=notes.append, on_commit=on_commit, deadline_s=2.0
    ) as saver:
        for step in (1, 2):
            saved.append(saver.save(step=step, samples_seen=step, model=small()[0]).name)
    return saved, notes


def test_a_listener_may_take_longer_than_the_deadline(tmp_path: Path) -> None:
    main, other = run_ranks(save_with_a_slow_listener, 2, tmp_path)
    line = f"{tmp_path}/checkpoints/000001: saved; on_commit is slow, and all ranks wait for it."
    assert main == (["000001", "000002"], [line])
    assert other == (["000001", "000002"], [])


def test_a_note_that_nobody_can_be_told_fails_no_save(tmp_path: Path) -> None:
    def closed(*told: Any) -> None:
        raise BrokenPipeError("standard output is closed")

    saver = CheckpointSaver(tmp_path, topology=ONE, on_note=closed, on_commit=closed)
    with saver:
        assert saver.save(step=1, samples_seen=0, model=small()[0]).is_dir()


def resave_without_the_right_to_delete(root: Path) -> list[str]:
    """As a user whom the former checkpoint's files do not belong to."""
    notes: list[str] = []
    model, _ = small()
    told = CheckpointSaver(root, topology=ONE, on_note=notes.append)
    with told as saver:
        saver.save(step=1, samples_seen=1, model=model)
    (root / "checkpoints/000001/pretrained_model").chmod(0o500)
    if os.geteuid() == 0:
        for path in (root, *root.rglob("*")):
            os.chown(path, 65534, -1, follow_symlinks=False)
        os.seteuid(65534)
    try:
        for samples in (2, 3):
            with CheckpointSaver(root, topology=ONE, on_note=notes.append) as saver:
                path = saver.save(step=1, samples_seen=samples, model=model)
            assert read_start(path, topology=ONE).samples_seen == samples
    finally:
        os.seteuid(os.getuid())
        for folder in root.glob("checkpoints/.0*/pretrained_model"):
            folder.chmod(0o700)
    return notes


def test_what_cannot_be_deleted_fails_neither_the_save_nor_the_next_start() -> None:
    # No other user may enter pytest's own folder.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        root = Path(folder) / "run"
        after_save, at_start = run_ranks(resave_without_the_right_to_delete, 1, root, init=False)[0]
        assert f"{root}/checkpoints/000001: saved; what it replaced is not removed" in after_save
        assert "Permission denied" in after_save
        assert "left by a save that did not finish, and not removed" in at_start
        saver_of(root).close()
        assert not RunFolder(root).hidden_folders()
