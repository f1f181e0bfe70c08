"""A name that the disk does not take is an error; a file system without such flushes is not."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from parallel_ckpt import CheckpointError, CheckpointSaver, RunFolder, newest_intact
from parallel_ckpt.convert import convert
from parallel_ckpt.store.commit import flush_folder
from parallel_config import CheckpointConfig, CheckpointFormat, Topology

REFUSED = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]
CANNOT = [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS]


def fail_on(patch: pytest.MonkeyPatch, folder: Path, number: int, after: int = 0) -> None:
    """Flushing this folder fails from then on, as a broken disk answers."""
    real, count = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode) and os.path.samestat(found, folder.stat()):
            count += 1
            if count > after:
                raise OSError(number, os.strerror(number))
        real(descriptor)

    patch.setattr(os, "fsync", fsync)


def open_saver(root: Path, notes: list[str], keep_last: int | None = None) -> CheckpointSaver:
    return CheckpointSaver(
        root,
        topology=Topology(),
        checkpoint_format=CheckpointFormat.DCP,
        config=CheckpointConfig(keep_last=keep_last),
        on_note=notes.append,
    )


def save(saver: CheckpointSaver, step: int, value: float) -> None:
    model = nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    saver.save(step=step, samples_seen=step, model=model)


@pytest.mark.parametrize("number", REFUSED)
def test_a_flush_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_on(monkeypatch, tmp_path, number)
    with pytest.raises(OSError) as caught:
        flush_folder(tmp_path)
    assert caught.value.errno == number
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("number", CANNOT)
def test_a_file_system_that_cannot_flush_folders_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_on(monkeypatch, tmp_path, number)
    flush_folder(tmp_path)


@pytest.mark.parametrize("step", [1, 2])
def test_a_commit_that_is_not_on_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    notes: list[str] = []
    run = RunFolder(tmp_path / "run")
    with open_saver(run.path, notes) as saver:
        save(saver, 1, 1.0)
        before = run.step(1).manifest.read_bytes()
        with monkeypatch.context() as patch:
            fail_on(patch, run.checkpoints, errno.EIO)
            with pytest.raises(CheckpointError, match="Input/output error"):
                save(saver, step, 2.0)
        assert run.committed_steps() == [1]
        assert run.step(1).manifest.read_bytes() == before
        assert os.readlink(run.last) == "000001"
        assert newest_intact(run.path) == (run.step(1).path, [])
        assert not run.hidden_folders()
        save(saver, step, 3.0)
    assert run.committed_steps() == sorted({1, step})
    assert notes == []


def test_the_former_checkpoint_stays_whole_until_its_rename_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    run = RunFolder(tmp_path / "run")
    with open_saver(run.path, notes, keep_last=1) as saver:
        save(saver, 1, 1.0)
        with monkeypatch.context() as patch:
            fail_on(patch, run.checkpoints, errno.EIO, after=1)  # the commit is on disk
            save(saver, 2, 2.0)
    (hidden,) = run.hidden_folders()
    assert (hidden.role, hidden.step) == ("del", 1)
    assert len(list(hidden.path.rglob("*"))) > 5
    assert notes == [f"{run.step(1).path}: not deleted: Input/output error ({run.checkpoints})."]


def test_opening_a_run_whose_folder_cannot_be_flushed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    fail_on(monkeypatch, run.path, errno.ENOSPC)
    with pytest.raises(CheckpointError, match="No space left on device"):
        open_saver(run.path, [])


def test_an_export_that_is_not_on_disk_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    with open_saver(run.path, []) as saver:
        save(saver, 1, 1.0)
    output = tmp_path / "exports" / "model"
    output.parent.mkdir()
    fail_on(monkeypatch, output.parent, errno.EIO)
    with pytest.raises(CheckpointError, match="stopped the conversion: Input/output error"):
        convert(run.path, output)
    assert list(output.parent.iterdir()) == []
