"""`checkpoints/last` leads to a whole checkpoint at every moment."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from parallel_ckpt import (
    CheckpointSaver,
    resolve_checkpoint,
)
from parallel_ckpt.inspect import RunInfo, inspect
from parallel_ckpt.verify import verify
from small_runs import ONE, build, quiet


def test_last_leads_to_a_whole_checkpoint_at_every_moment(tmp_path: Path) -> None:
    model, optimizer = build()
    problems: list[str] = []
    seen: set[str] = set()
    done = threading.Event()
    last = tmp_path / "checkpoints/last"

    def poll() -> None:
        while not done.is_set():
            try:
                name = os.readlink(last)
                with open(last / "manifest.json", encoding="utf-8") as file:
                    json.load(file)
                seen.add(name)
            except (OSError, ValueError) as error:
                problems.append(repr(error))
            time.sleep(0.0005)

    with CheckpointSaver(tmp_path, topology=ONE, on_note=quiet) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
        thread = threading.Thread(target=poll)
        thread.start()
        for step in range(2, 22):
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
        done.set()
        thread.join()
    assert not problems
    assert len(seen) > 5


def test_a_last_that_leads_nowhere_is_set_right(tmp_path: Path) -> None:
    model, optimizer = build()
    with CheckpointSaver(tmp_path, topology=ONE, on_note=quiet) as saver:
        for step in (2, 1):  # taken up again from before 2
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
    last = tmp_path / "checkpoints/last"
    last.unlink()
    last.symlink_to("000009")
    assert resolve_checkpoint(tmp_path).name == "000001"
    assert resolve_checkpoint(last).name == "000001"
    notes: list[str] = []
    CheckpointSaver(tmp_path, topology=ONE, on_note=notes.append).close()
    assert os.readlink(last) == "000001"
    assert "pointed at nothing" in notes[0]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("three")
    model, optimizer = build()
    with CheckpointSaver(root, topology=ONE, on_note=quiet) as saver:
        for step in (1, 2, 3):
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
    return root


def inspected(root: Path) -> tuple[RunInfo, str]:
    info = inspect(root)
    assert isinstance(info, RunInfo)
    return info, info.render()


def test_inspect_says_that_last_cannot_be_read_and_shows_the_rest(
    three: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(three, tmp_path / "run", symlinks=True)
    assert inspected(run)[0].problems_of_last == ()
    (run / "checkpoints/000003/manifest.json").write_text("{")
    info, text = inspected(run)
    assert [found.manifest.step for found in info.checkpoints] == [1, 2]
    assert f"{run}: 2 checkpoints\n" in text
    assert f"  unreadable: {run}/checkpoints/000003/manifest.json is not a JSON document" in text
    assert "\n  last: names 000003, which cannot be read.\n" in text
    assert f"\n{run}/checkpoints/000002\n  step        2," in text
    assert json.loads(info.to_json())["problems_of_last"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("000009", "does not lead to a checkpoint."),
        (None, "is missing."),
        ("copy", "is a folder of its own, which no save updates."),
    ],
)
def test_inspect_says_that_last_leads_nowhere(
    target: str | None, words: str, three: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(three, tmp_path / "run", symlinks=True)
    last = run / "checkpoints/last"
    last.unlink()
    if target == "copy":
        shutil.copytree(run / "checkpoints/000002", last)
    elif target is not None:
        last.symlink_to(target)
    _, text = inspected(run)
    assert f"\n  last: {words}\n" in text
    assert f"\n{run}/checkpoints/000003\n  step        3," in text


def test_one_is_not_a_plural(three: Path, tmp_path: Path) -> None:
    run = shutil.copytree(three, tmp_path / "run", symlinks=True)
    for step in (1, 2):
        shutil.rmtree(run / f"checkpoints/00000{step}")
    (run / "checkpoints/000003/training_state/scheduler.json").unlink()
    _, text = inspected(run)
    assert f"{run}: 1 checkpoint\n" in text
    assert "  DAMAGED (1 problem) <- last" in text
    assert "  health      damaged: 1 problem" in text
    assert verify(run).render().endswith("damaged: 1 problem")
