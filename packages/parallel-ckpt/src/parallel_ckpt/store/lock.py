"""`run.lock`: a run folder has one writer.

The holder touches the file every few seconds. A lock is taken over, with a note, when its process
is known to have ended or when it was not touched for long. A fresh lock is refused, because two
writers would remove each other's saves as leftovers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from parallel_ckpt.errors import CheckpointError

BEAT_S = 5.0
"""Seconds between two touches by the holder."""
STALE_S = 60.0
"""A lock that was not touched for this long is free: its holder missed a dozen beats."""
MAX_LOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as written in it."""

    host: str
    boot: str
    """Of the kernel, drawn anew at each start: machines may share a host name and storage. Empty
    where there is none, and in locks of former versions."""
    pid: int
    namespace: str
    """Of process ids: containers of one host may not see one another's processes."""
    started: str
    """Of the process, as the kernel counts: tells a process from a later one of the same pid."""
    token: str

    @classmethod
    def here(cls) -> Holder:
        """The process that asks, with a token of its own."""
        pid = os.getpid()
        host, token = socket.gethostname(), uuid.uuid4().hex
        return cls(host, _boot(), pid, _namespace(), _started(pid), token)

    @property
    def is_local(self) -> bool:
        """Whether its process is one that we could see; false where that is not certain.

        The first process namespace of every machine has the same number.
        """
        here = (socket.gethostname(), _boot(), _namespace())
        return bool(self.boot) and (self.host, self.boot, self.namespace) == here

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended; a process of another host never is."""
        return self.is_local and (not self.started or _started(self.pid) != self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """A held lock; `release` it. Made by `acquire`."""

    def __init__(self, path: Path, holder: Holder, beat_s: float) -> None:
        self.path = path
        self.holder = holder
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(beat_s,), name="run.lock", daemon=True
        )
        self._thread.start()

    @classmethod
    def acquire(
        cls, path: Path, *, beat_s: float = BEAT_S, stale_s: float = STALE_S
    ) -> tuple[RunLock, list[str]]:
        """Take the lock, at most by waiting until a silent one counts as stale.

        Returns it with a line for each lock that was taken over.

        Raises:
            CheckpointError: its holder is alive.
        """
        # A loop: between looking at a dead lock and taking it away another process may do the same.
        # Creation is the only step that decides, and it succeeds for one process alone.
        mine, notes = Holder.here(), []
        path.parent.mkdir(parents=True, exist_ok=True)
        while not _create(path, mine):
            found = read_holder(path)
            _refuse_if_alive(path, found, stale_s)
            if _take_away(path, found):
                notes.append(f"{path}: taken over; {found or 'its holder'} is gone.")
        # What processes left that died while they tried.
        for leftover in path.parent.glob(f".{path.name}.*"):
            leftover.unlink(missing_ok=True)
        return cls(path, mine, beat_s), notes

    @property
    def is_held(self) -> bool:
        """Whether the lock is still ours: a holder that was stopped for long may have lost it."""
        return read_holder(self.path) == self.holder

    def check(self) -> None:
        """Raise unless the lock is still ours.

        Raises:
            CheckpointError: another process has taken it over.
            OSError: it cannot be read.
        """
        if not self.is_held:
            self.path.read_bytes()  # a lock that cannot be read may still be ours: say that instead
            raise CheckpointError.of(
                self.path,
                f"was taken over by {read_holder(self.path) or 'another process'}.",
                "Only one run may write here.",
            )

    def release(self) -> None:
        """Stop touching the lock and remove it, if it is still ours."""
        # First the thread: a touch after the removal would meet the lock of the next holder.
        self._stop.set()
        self._thread.join()
        if self.is_held:
            self.path.unlink(missing_ok=True)

    def _beat(self, beat_s: float) -> None:
        while not self._stop.wait(beat_s):
            try:
                if self.is_held:
                    os.utime(self.path)
            except OSError:
                continue  # A file system that hangs for a moment must not end the run.


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock; None when it does not exist or cannot be read."""
    try:
        if path.stat().st_size > MAX_LOCK_BYTES:
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        return Holder(
            str(document["host"]),
            str(document.get("boot", "")),
            int(document["pid"]),
            str(document["namespace"]),
            str(document["started"]),
            str(document["token"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _create(path: Path, holder: Holder) -> bool:
    """Create the lock unless there is one; complete from the first moment that others see it."""
    # Written under another name and linked: creating the lock and then writing it would show
    # others an empty lock for a moment, and linking fails when the name is taken.
    spare = path.with_name(f".{path.name}.{holder.token}")
    spare.write_text(json.dumps(asdict(holder)) + "\n", encoding="utf-8")
    try:
        os.link(spare, path)
    except FileExistsError:
        return False
    except OSError:
        return _create_without_links(path, holder)
    finally:
        spare.unlink(missing_ok=True)
    return True


def _create_without_links(path: Path, holder: Holder) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(holder)) + "\n")
    except FileExistsError:
        return False
    return True


def _refuse_if_alive(path: Path, found: Holder | None, stale_s: float) -> None:
    """Return when the lock's holder is gone, raise when it lives; wait while neither is known."""
    if found is not None and found.is_gone:
        return
    is_alive = found is not None and found.is_local
    # A process that we can see is known to live. Of any other only a touch tells: we wait for one
    # until the lock counts as stale.
    first = _touched(path)
    while first is not None and _now(path) - first <= stale_s:
        if is_alive or _touched(path) not in (first, None):
            raise CheckpointError.of(
                path,
                f"is held by {found or 'another process'}, which is alive.",
                "Stop that run first, or use another --output_dir.",
            )
        if _touched(path) is None:
            return
        time.sleep(min(0.5, stale_s / 10))


def _take_away(path: Path, expected: Holder | None) -> bool:
    """Remove a dead lock; False when another process was faster."""
    # Moved aside first and looked at then: removing it by its name could remove the lock that
    # another process has created in the meantime.
    grave = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        os.rename(path, grave)
    except FileNotFoundError:
        return False
    if read_holder(grave) == expected:
        grave.unlink(missing_ok=True)
        return True
    with contextlib.suppress(OSError):
        # That is what happened: give the live lock back.
        os.link(grave, path)
    grave.unlink(missing_ok=True)
    return False


def _touched(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _now(path: Path) -> float:
    """The file system's own time, which a lock's age is counted in: hosts' clocks differ."""
    probe = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with probe.open("x") as file:
            return os.fstat(file.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start time of a process in kernel ticks; empty when the process does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _started_without_proc(pid)
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def _started_without_proc(pid: int) -> str:
    if Path("/proc/self/stat").exists():
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
