"""Stops on request: a signal on any rank becomes one decision of all, at a step boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
ONE_REQUEST_S = 2.0
"""Signals this close together are one request: schedulers signal a launcher and its workers, and
the launcher passes its own on."""


class StopRequest:
    """Notes the first stop signal. Entered in the main thread.

    Args:
        announce: Written to stderr at the first signal, after the signal's name.
        on_second: Called with the number of every later signal, which means "at once".
        one_request_s: Seconds after the first signal in which others belong to it.
    """

    def __init__(
        self,
        *,
        announce: str = "",
        on_second: Callable[[int], None] = lambda number: None,
        one_request_s: float = ONE_REQUEST_S,
    ) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._announce = announce
        self._on_second, self._one_request_s = on_second, one_request_s
        self._previous: dict[signal.Signals, object] = {}

    def is_asked(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            # `nohup` starts a process so: a terminal that closes is then none of its business.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            # Python sets handlers in the main thread only.
            self._previous[number] = signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a launcher may have held them
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = signal.Signals(number), now
            if self._announce:  # no print: the signal may have come in the middle of one
                # A terminal that has closed is not an error of wherever the signal came.
                with contextlib.suppress(OSError):
                    os.write(2, f"{self.received.name}: {self._announce}\n".encode())
        # Monotonic time: a clock that is set must not turn one request into two.
        elif now - self._since > self._one_request_s:
            self._on_second(number)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Stop signals wait meanwhile, also in processes started here until they enter a request."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_without_launcher(descriptor: int) -> None:
    """Ask this process to stop once the launcher, which holds the other end, is gone.

    All its workers notice at the same time. Without a launcher nothing would wait for them.
    """
    thread = threading.Thread(
        # A daemon: the thread waits in read for as long as the launcher lives.
        target=_watch_launcher,
        args=(descriptor,),
        daemon=True,
        name="launcher",
    )
    thread.start()


def _watch_launcher(descriptor: int) -> None:
    try:
        # Nothing is ever written: the read returns when the last writing end is closed, by any
        # death.
        gone = os.read(descriptor, 1) == b""
    except OSError:  # a process further down inherited the number, not the descriptor
        return
    if gone:
        # By signal: the process then stops as on any other request.
        os.kill(os.getpid(), signal.SIGTERM)
