"""Killed between the two renames of a replacement, and runs whose `last` is a folder."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from parallel_ckpt import (
    RunFolder,
    mend_run,
    newest_intact,
    read_start,
    resolve_checkpoint,
)
from parallel_ckpt.inspect import RunInfo, inspect
from parallel_ckpt.verify import verify
from parallel_testing.ranks import run_ranks
from small_runs import ONE, saver_of, small


def save(run: Path, step: int, samples: int) -> None:
    with saver_of(run) as saver:
        saver.save(step=step, samples_seen=samples, model=small()[0])


def killed_between_the_renames(run: Path) -> None:
    """Runs in a process of its own: a child is killed as it gives the new checkpoint its name."""
    pid = os.fork()
    if pid == 0:

        def hook(event: str, args: tuple[object, ...]) -> None:
            if event == "os.rename" and str(args[1]).endswith("checkpoints/000002"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save(run, 2, 20)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("killed") / "run"
    save(run, 1, 1)
    save(run, 2, 2)
    run_ranks(killed_between_the_renames, 1, run, init=False)
    assert RunFolder(run).committed_steps() == [1]
    return run


@pytest.mark.parametrize(
    "named", ["", "checkpoints", "checkpoints/last", "checkpoints/000002/pretrained_model"]
)
def test_every_reader_sees_the_checkpoint_that_was_moved_aside(killed: Path, named: str) -> None:
    found = resolve_checkpoint(killed / named)
    assert found.name.startswith(".000002.old-")
    assert verify(killed / named).ok
    assert read_start(killed / named, topology=ONE).samples_seen == 2
    assert newest_intact(killed) == (found, [])


def test_inspect_lists_what_was_moved_aside(killed: Path) -> None:
    info = inspect(killed)
    assert isinstance(info, RunInfo)
    assert [one.manifest.step for one in info.checkpoints] == [1, 2]
    assert info.last == info.checkpoints[1].path


def test_what_was_moved_aside_has_its_name_again_once_mended(killed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(killed, tmp_path / "run", symlinks=True)
    (run / "run.lock").unlink(missing_ok=True)
    assert "put back" in mend_run(run)[0]
    for named in ("", "checkpoints/last", "checkpoints/000002"):
        assert resolve_checkpoint(run / named) == run / "checkpoints/000002"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A run of two steps, copied with links followed, that then went on to a third step."""
    save(tmp_path / "origin", 1, 1)
    save(tmp_path / "origin", 2, 2)
    return shutil.copytree(tmp_path / "origin", tmp_path / "run")


def test_a_last_that_is_a_folder_never_hides_what_is_newer(copied: Path) -> None:
    shutil.copytree(copied / "checkpoints/last", copied.parent / "kept")
    save(copied, 3, 3)  # the saver mends the link
    last = RunFolder(copied).last
    last.unlink()
    shutil.copytree(copied.parent / "kept", last)
    for named in ("", "checkpoints", "checkpoints/last", "checkpoints/last/pretrained_model"):
        assert resolve_checkpoint(copied / named) == copied / "checkpoints/000003"


def test_a_copy_is_replaced_by_a_link(copied: Path) -> None:
    last = RunFolder(copied).last
    assert mend_run(copied) == [f"{last}: was a copy of 000002, not a link; removed."]
    assert os.readlink(last) == "000002"
    assert mend_run(copied) == []


def test_a_last_that_is_the_only_copy_becomes_its_step(copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints/000002")
    assert resolve_checkpoint(copied) == RunFolder(copied).last
    assert mend_run(copied) == [
        f"{RunFolder(copied).last}: was a folder, not a link; it is 000002 now."
    ]
    assert os.readlink(RunFolder(copied).last) == "000002"
    assert read_start(copied, topology=ONE).samples_seen == 2


def test_a_folder_that_holds_something_else_is_named_and_kept(copied: Path) -> None:
    save(copied.parent / "other", 2, 9)
    last = RunFolder(copied).last
    shutil.rmtree(last)
    shutil.copytree(copied.parent / "other/checkpoints/000002", last)
    (note,) = mend_run(copied)
    assert note == (
        f"{last}: is a folder, not a link, and holds files that do "
        "not belong to a step folder. Saves do not update it. Move it away."
    )
    assert (last / "manifest.json").is_file()
