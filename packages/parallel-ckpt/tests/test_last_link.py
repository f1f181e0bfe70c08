"""`checkpoints/last` leads to a whole checkpoint at every moment."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from parallel_ckpt import (
    CheckpointSaver,
    resolve_checkpoint,
)
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
