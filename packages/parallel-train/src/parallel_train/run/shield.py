"""stdout and stderr of a run: a console that fails costs its lines, never the run."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO, cast

STALL_S = 10.0
"""How long a line waits for a console that takes nothing, such as a pager that is not read."""
PIECE_BYTES = 4096
"""POSIX promises that a pipe that is ready takes this much without blocking."""
MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EFBIG}
"""Errors after which a later line may well be written: of a full disk somebody makes room."""


class ShieldedStream(io.TextIOBase):
    """Writes lines to the descriptor of `under`, or drops them. It never raises and never hangs.

    Args:
        under: A stream with a descriptor.
        name: What the user calls it.
    """

    def __init__(self, under: TextIO, name: str) -> None:
        self._under, self._name, self._fd = under, name, under.fileno()
        self._coding = under.encoding or "utf-8"
        self._pending = ""
        self._stalled = self._told = False
        self.other: TextIO | None = None
        """Where it is said that lines are lost."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._under, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As the console has it."""
        return self._coding

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Always: what cannot be written is dropped."""
        return True

    def write(self, text: str) -> int:
        """Take text; it is sent when its line ends, so that lines of several ranks stay whole."""
        self._pending += text
        if "\n" in text or "\r" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Send what is pending."""
        text, self._pending = self._pending, ""
        if text:
            # A console of ASCII must still show a path with an umlaut in some way.
            self._send(text.encode(self._coding, errors="backslashreplace"))

    def _send(self, data: bytes) -> None:
        # Straight to the descriptor: a buffer would keep what failed, and fail again at the exit;
        # and a loader worker that is forked meanwhile would inherit its lock.
        try:
            while data:
                self._wait_until_ready()
                data = data[os.write(self._fd, data[:PIECE_BYTES]) :]
        except OSError as error:
            self._lose(error)

    def _wait_until_ready(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        # It has waited once already: the training must not wait again for every line.
        if not poll.poll(0 if self._stalled else STALL_S * 1000):
            self._stalled = True
            raise BlockingIOError(errno.EAGAIN, f"nothing was read for {STALL_S:g} s")
        self._stalled = False

    def _lose(self, error: OSError) -> None:
        if error.errno not in MAY_PASS:
            # Also for what does not write through this object: libraries, loader workers.
            with contextlib.suppress(OSError), open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), self._fd)
        if not self._told and self.other is not None:
            self._told = True
            print(
                f"ptrain: {self._name} cannot be written ({error.strerror}). Its lines are "
                "dropped, and the run goes on; metrics.jsonl holds every update.",
                file=self.other,
            )


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Within, nothing that happens to stdout or stderr raises."""
    before = sys.stdout, sys.stderr
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    out, err = _shield(sys.stdout, "stdout"), _shield(sys.stderr, "stderr")
    for stream, other in ((out, err), (err, out)):
        if isinstance(stream, ShieldedStream):
            stream.other = other
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        for stream in (out, err):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _shield(stream: TextIO, name: str) -> TextIO:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):  # a program that embeds us has put its own there
        return stream
    return cast(TextIO, ShieldedStream(stream, name))


def open_missing_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr (`>&-`) empty ones.

    Otherwise the next file that is opened, a checkpoint perhaps, gets the descriptor, and whatever
    a library prints goes into it.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one: those below are open.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w"))
