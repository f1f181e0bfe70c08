"""Names the loader worker that died, where torch's error may only tell of a broken connection."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import signal
import time
import weakref
from typing import Any

_started: weakref.WeakSet[Any] = weakref.WeakSet()
"""Worker processes of every loader of this process, for as long as their loader holds them."""
REAPED_S = 1.0
"""A process closes its connections a moment before it counts as ended."""
WAYS = {
    signal.SIGKILL: (
        "the usual cause is the kernel, because memory ran out. Use fewer "
        "--dataset.num_workers (now "
        "{workers}), or a smaller --dataset.prefetch_factor or --batch_size"
    ),
    signal.SIGBUS: (
        "the usual cause is a full shared memory (/dev/shm). Make it larger (docker: "
        "--shm-size), or use --dataset.num_workers 0"
    ),
}
OTHERWISE = "--dataset.num_workers 0 reads in the training process, and shows where it fails"


class WorkerDeath(RuntimeError):
    """A loader worker of this rank has died; the message says which, how, and what helps."""


def remembering() -> multiprocessing.context.BaseContext:
    """The usual way to start processes, which remembers those that it starts."""
    usual: Any = type(multiprocessing.get_context())

    class Remembering(usual):  # type: ignore[misc]
        def Process(self, *args: Any, **kwargs: Any) -> Any:
            process = usual.Process(*args, **kwargs)
            _started.add(process)
            return process

    return Remembering()


def worker_death() -> WorkerDeath | None:
    """The death of a loader worker of this process, if there was one in the last moment."""
    deadline = time.monotonic() + REAPED_S
    while _started:
        for process in list(_started):
            # A worker that ends as it should leaves with 0.
            if process.pid is not None and process.exitcode:
                return WorkerDeath(_message(process.pid, process.exitcode, len(_started)))
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return None


def _message(pid: int, code: int, workers: int) -> str:
    if code > 0:
        return f"a loader worker (process {pid}) left with {code}: {OTHERWISE}."
    name = signal.Signals(-code).name
    way = WAYS.get(signal.Signals(-code), OTHERWISE).format(workers=workers)
    return f"a loader worker (process {pid}) was ended by {name}: {way}."
