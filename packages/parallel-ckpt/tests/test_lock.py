"""A run folder has one writer: who may take its lock, and what a lost lock stops."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from parallel_ckpt import (
    CheckpointError,
)
from parallel_ckpt.store.lock import RunLock
from small_runs import saver_of, small


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with (
        saver_of(tmp_path),
        pytest.raises(CheckpointError, match=r"is held by process \d+ .* alive"),
    ):
        saver_of(tmp_path)
    saver_of(tmp_path).close()
    assert not list(tmp_path.glob("*run.lock*"))


def write_lock(path: Path, **changes: Any) -> None:
    mine, _ = RunLock.acquire(path)
    mine.release()
    document = {
        "host": mine.holder.host,
        "boot": mine.holder.boot,
        "pid": mine.holder.pid,
        "namespace": mine.holder.namespace,
        "started": mine.holder.started,
        "token": "other",
    }
    document |= changes
    path.write_text(json.dumps({key: v for key, v in document.items() if v is not None}))


def test_a_dead_process_of_this_host_is_taken_over_at_once(tmp_path: Path) -> None:
    write_lock(tmp_path / "run.lock", started="1")
    begin = time.monotonic()
    lock, notes = RunLock.acquire(tmp_path / "run.lock")
    assert time.monotonic() - begin < 1
    assert "taken over" in notes[0]
    lock.release()


@pytest.mark.parametrize(
    "changes",
    [
        {"host": socket.gethostname() + "-other"},
        {"boot": "another machine of the same host name"},
        {"boot": None},
        {"boot": ""},
        {"namespace": "pid:[1]"},
    ],
)
def test_another_machine_is_watched_until_it_is_known_to_be_dead_or_alive(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """No process here has the start time of the holder's, so it would count as gone if local."""
    path = tmp_path / "run.lock"
    write_lock(path, started="1", **changes)
    lock, notes = RunLock.acquire(path, stale_s=0.5)
    assert len(notes) == 1
    lock.release()
    write_lock(path, started="1", **changes)
    beat = threading.Timer(0.3, os.utime, [path])
    beat.start()
    with pytest.raises(CheckpointError, match="which is alive"):
        RunLock.acquire(path, stale_s=5)
    beat.join()


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"pid": "x"}', ""])
def test_a_lock_that_says_nothing_is_watched_too(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text(text)
    lock, notes = RunLock.acquire(path, stale_s=0.5)
    assert "its holder is gone" in notes[0]
    lock.release()


def test_a_lost_lock_stops_the_save(tmp_path: Path) -> None:
    model, optimizer = small()
    with saver_of(tmp_path) as saver:
        lock = tmp_path / "run.lock"
        document = json.loads(lock.read_text()) | {"token": "thief"}
        lock.write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match="was taken over by"):
            saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    assert lock.exists()
