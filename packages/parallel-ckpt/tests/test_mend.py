"""What a killed save leaves in a run folder is put right, by `mend_run` and by the next saver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    RunFolder,
    mend_run,
    newest_intact,
)
from parallel_ckpt.store.workspace import temporary_folder
from parallel_config import Topology
from parallel_testing.ranks import run_ranks
from small_runs import change_manifest, read_manifest_of, saver_of, small


def killed_while_it_replaced(root: Path) -> RunFolder:
    """A run whose newest checkpoint was moved aside for one that was never finished."""
    run = RunFolder(root)
    with CheckpointSaver(root, topology=Topology(), on_note=lambda note: None) as saver:
        for step in (1, 2):
            saver.save(step=step, samples_seen=step, model=nn.Linear(2, 2))
    run.step(2).path.rename(run.hidden(2, "old", "a"))
    run.hidden(2, "tmp", "b").mkdir()
    (run.checkpoints / ".last.spare").symlink_to("000002")
    return run


def test_a_run_is_mended_without_a_saver(tmp_path: Path) -> None:
    run = killed_while_it_replaced(tmp_path)
    assert not run.last.exists()
    notes = mend_run(tmp_path)
    assert notes == [
        f"{run.checkpoints}/000002: put back; its replacement was never finished.",
        ".000002.tmp-b: removed; it was left by a save that did not finish.",
    ]
    assert sorted(os.listdir(run.checkpoints)) == ["000001", "000002", "last"]
    assert newest_intact(tmp_path) == (run.step(2).path, [])
    assert not run.lock.exists()
    assert mend_run(tmp_path) == []


def test_a_run_that_another_process_writes_is_not_touched(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, topology=Topology()) as saver:
        saver.save(step=1, samples_seen=1, model=nn.Linear(2, 2))
        under_way = RunFolder(tmp_path).hidden(2, "tmp", "b")
        under_way.mkdir()
        with pytest.raises(CheckpointError, match=r"run\.lock is held by process \d+ on .* alive"):
            mend_run(tmp_path)
        assert under_way.is_dir()
        assert RunFolder(tmp_path).lock.exists()


def test_of_two_that_were_moved_aside_the_later_one_is_put_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for token, samples in (("b", 5), ("a", 7), ("c", 6)):
        with saver_of(tmp_path) as saver:
            saver.save(step=1, samples_seen=samples, model=small()[0])
        run.step(1).path.rename(run.hidden(1, "old", token))
        change_manifest(run.hidden(1, "old", token), sequence=samples)
        if token != "c":
            run.hidden(1, "old", token).rename(tmp_path / token)
    for token in "ab":
        (tmp_path / token).rename(run.hidden(1, "old", token))
    mend_run(tmp_path)
    assert read_manifest_of(tmp_path).samples_seen == 7
    assert not run.hidden_folders()


def mend_on_ranks(root: Path, own: Path) -> tuple[list[str], str]:
    """What each rank is told of the shared folder, and of one that is not shared."""
    notes = mend_run(root)
    try:
        mend_run(own / str(dist.get_rank()))
    except CheckpointError as error:
        return notes, str(error)
    return notes, ""


def test_every_rank_has_the_same_lines_and_sees_the_folder(tmp_path: Path) -> None:
    killed_while_it_replaced(tmp_path / "run")
    outcomes = run_ranks(mend_on_ranks, 2, tmp_path / "run", tmp_path / "own")
    assert outcomes[0] == outcomes[1]
    notes, error = outcomes[0]
    assert len(notes) == 2
    assert "is not shared by rank 1: it does not see a file" in error
    assert not list((tmp_path / "own").rglob("*run.lock*"))


def test_what_a_killed_conversion_left_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    with saver_of(tmp_path) as saver:
        saver.save(step=1, samples_seen=1, model=small()[0])
    parent = RunFolder(tmp_path).step(1).pretrained_model
    dead = parent / ".converting-dead"
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    with temporary_folder(parent, ".converting-live") as live:
        assert mend_run(tmp_path) == [f"{dead}: removed; a conversion left it."]
        assert live.is_dir()
    assert not dead.exists()
