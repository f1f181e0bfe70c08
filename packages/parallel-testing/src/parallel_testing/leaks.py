"""Fails each test that leaves a variable, a thread, a process or a process group behind.

A suite enables it in its conftest.py:

    from parallel_testing.leaks import no_leaks  # noqa: F401
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

GRACE_S = 3.0
"""How long threads and processes that end by themselves may take after the test returns."""
_CACHES = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "KMP_INIT_AT_FORK",
        "KMP_DUPLICATE_LIB_OK",
    }
)
"""Variables that pytest, torch and its OpenMP set for themselves when first used."""
_SERVICES = ("TMonitor", "InductorSubproc")
"""Daemon threads that libraries start once per process and keep."""


@dataclass(frozen=True)
class Surroundings:
    """Everything that a test could leave behind, as it is at one moment."""

    variables: dict[str, str] = field(repr=False)
    threads: frozenset[int]
    processes: frozenset[int]
    has_group: bool

    @classmethod
    def now(cls) -> Surroundings:
        """As they are."""
        return cls(
            {name: value for name, value in os.environ.items() if name not in _CACHES},
            frozenset(_threads()),
            frozenset(_children()),
            _has_group(),
        )

    def leaked_since(self, before: Surroundings) -> list[str]:
        """One line for each new thread, process or group, and for each variable that differs."""
        # Threads and processes that ended are not a leak. A variable that vanished is one.
        lines = [f"thread {_threads().get(i, i)!r}" for i in self.threads - before.threads]
        lines += [f"process {_command(pid)}" for pid in self.processes - before.processes]
        names = self.variables.keys() | before.variables.keys()
        lines += [
            f"variable {name} = {self.variables.get(name)!r}, was {before.variables.get(name)!r}"
            for name in sorted(names)
            if self.variables.get(name) != before.variables.get(name)
        ]
        if self.has_group and not before.has_group:
            lines.append("a process group that is still initialised")
        return lines


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves something behind that was not there before it."""
    before = Surroundings.now()
    yield
    leaks = _settled(before)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _settled(before: Surroundings) -> list[str]:
    deadline = time.monotonic() + GRACE_S
    while leaks := Surroundings.now().leaked_since(before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return leaks


def _threads() -> dict[int, str]:
    """Names of Python threads by identity, without the services of libraries."""
    alive = [(id(thread), thread.name, type(thread).__name__) for thread in threading.enumerate()]
    return {key: name for key, name, kind in alive if not (kind + name).startswith(_SERVICES)}


def _children() -> set[int]:
    """Running children of this process, except those that multiprocessing keeps for itself."""
    multiprocessing.active_children()  # reaps the ones that ended
    kept = {
        # These two live as long as the test process, for all of its tests. Their names are
        # private, hence the defaults.
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    }
    found: set[int] = set()
    # Linux lists children by the thread that started them; a thread may end while it is read.
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in path.read_text().split())
    return {pid for pid in found if pid not in kept and _runs(pid)}


def _runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie.

    The command line does not show that: it is empty for a moment while a new program is loaded.
    """
    try:
        # The name of the program may hold spaces and brackets, so the state is what follows the
        # last one.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _command(pid: int) -> str:
    """Number and command line of a process."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        line = ""
    return f"{pid}: {line or 'no command line'}"


def _has_group() -> bool:
    # Not imported here: a suite without torch must not pay for it.
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
