"""Stopping on request: a signal on any rank becomes one decision of all, at a step boundary."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

PREEMPTED = 75
"""Exit code of a run that saved and left because it was asked to (EX_TEMPFAIL of sysexits.h)."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Notes the first stop signal; a second one ends the process at once.

    Checkpoints are committed by rename, so that ending at any moment damages none.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
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
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number)
