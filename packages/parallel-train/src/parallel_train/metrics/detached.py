"""A sink in a thread of its own: a server that does not answer never holds the training up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from parallel_train.metrics.sinks import Row, Sink

MOST_ROWS = 10_000
"""Rows that wait at most, a few MB."""
CLOSE_S = 120.0
"""How long the end of a run waits for rows that are still to be sent."""
THREAD = "sink-"
"""Begin of the names of threads that a run may leave behind: its exit does not wait for them."""


class DetachedSink:
    """Hands rows on to `sink` in a thread. The first error of it is raised by the next call.

    Args:
        sink: What is written to; only the thread calls it.
        name: For messages.
        close_s: Seconds that `close` waits for it.
        most_rows: Rows that may wait.
    """

    def __init__(
        self, sink: Sink, name: str, *, close_s: float = CLOSE_S, most_rows: int = MOST_ROWS
    ) -> None:
        self.name = name
        self._sink, self._close_s = sink, close_s
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(most_rows)
        self._error: Exception | None = None
        # A daemon: a server that never answers must not keep the process.
        self._thread = threading.Thread(target=self._work, name=THREAD + name, daemon=True)
        self._thread.start()

    def emit(self, row: Row) -> None:
        """Take the row, and return at once.

        Raises:
            Exception: what an earlier row met.
            TimeoutError: too many rows wait.
        """
        self._put(lambda: self._sink.emit(row))

    def note(self, line: str) -> None:
        """Take the line, and return at once."""
        self._put(lambda: self._sink.note(line))

    def close(self) -> None:
        """Let the thread send what waits, and close the sink.

        Raises:
            Exception: what it met.
            TimeoutError: it is not done in time, and goes on alone until the process ends.
        """
        try:
            self._put(self._sink.close)
            self._put(None)
        finally:
            self._thread.join(self._close_s if self._error is None else 0)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"it did not end within {self._close_s:g} s")

    def _put(self, call: Callable[[], None] | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            # Kept: `close` then does not wait for what does not answer.
            self._error = TimeoutError(f"{self._waiting.maxsize:,} updates wait to be sent")
            raise self._error from None

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                call()
            except Exception as error:
                self._error = error
            if self._error is not None:  # given up, here or by `emit`
                return
