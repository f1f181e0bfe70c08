"""Where the numbers of a run go. The loop hands every sink the same row; sinks never train."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Value = int | float
MOST_WAITING_BYTES = 64 * 2**20
"""Rows that wait for room on the disk: a few hundred thousand."""


@dataclass(frozen=True)
class Row:
    """The numbers of one optimizer update."""

    step: int
    """Updates done."""
    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate of this update."""
    samples_seen: int
    """Samples consumed since the start of the run, over all ranks."""
    samples_per_s: float
    """Throughput of all ranks together."""
    extra: Mapping[str, Value] = field(default_factory=dict)
    """The policy's own metrics, and counters."""

    @staticmethod
    def name_of(metric: str) -> str:
        """The name under which a policy's metric goes into `extra`.

        What the run itself says keeps its names; a policy may well return a `loss` of its own.
        """
        # Names of held-out metrics begin with eval_: a policy must not write over them either.
        taken = metric in _OWN_NAMES or metric.startswith("eval_")
        return f"policy_{metric}" if taken else metric

    def to_json(self) -> str:
        """One line, floats in full precision (NaN and infinities as Python writes them)."""
        fixed = {k: v for k, v in vars(self).items() if k != "extra"}
        return json.dumps({**fixed, **self.extra})


COSTS = ("data_s", "peak_memory_gb")
"""In `extra` of every row, and left out of the console's line, which is long enough."""
_OWN_NAMES = {"mfu", "skipped", *COSTS, *(f.name for f in dataclasses.fields(Row))}


class Sink(Protocol):
    """Takes rows; `close` is called once, also after an error."""

    def emit(self, row: Row) -> None:
        """Take the numbers of one update."""
        ...

    def note(self, line: str) -> None:
        """Take a line of text for people."""
        ...

    def close(self) -> None:
        """Flush what is pending."""
        ...


class JsonlSink:
    """`metrics.jsonl`: a line per update, flushed at once so that a crash loses none.

    It is the last thing to be given up: rows that a full disk refuses wait in memory, and every
    later row tries again.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        # Without a buffer: what was written and what was not is known to the byte.
        self._file: FileIO = path.open("ab", buffering=0)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._lost = 0
        self._told = False
        self.tell: Callable[[str], None] = lambda line: None
        """Takes a line for people."""

    def emit(self, row: Row) -> None:
        """Append the row."""
        line = row.to_json().encode() + b"\n"
        if self._waiting_bytes + len(line) > MOST_WAITING_BYTES:
            self._lost += 1  # weeks without room: the memory is the training's
        else:
            self._waiting.append(line)
            self._waiting_bytes += len(line)
        try:
            self._write()
        except OSError as error:
            if not self._told:
                self._told = True
                self.tell(
                    f"metrics.jsonl cannot be written ({error.strerror}): its rows wait in memory "
                    "until it can, and the training goes on"
                )
        else:
            self._told = False

    def _write(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            # A disk that fills up takes part of a line. The rest comes right behind it, later.
            written = self._file.write(line) or 0
            self._waiting_bytes -= written
            if written == len(line):
                self._waiting.popleft()
            else:
                self._waiting[0] = line[written:]

    def note(self, line: str) -> None:
        """Notes are for people."""

    def close(self) -> None:
        """Close the file, after a last try to write what waits.

        Raises:
            OSError: rows are lost.
        """
        with contextlib.suppress(OSError):
            self._write()
        self._file.close()
        lost = self._lost + len(self._waiting)
        if lost:
            raise OSError(errno.ENOSPC, f"{lost:,} updates are missing in it")


class Due:
    """Which updates are shown, and how long the rest takes."""

    def __init__(self, steps: int, start: int, log_freq: int) -> None:
        self._steps, self._start, self._log_freq = steps, start, log_freq
        self._first: tuple[int, float] | None = None

    def is_due(self, row: Row) -> bool:
        """Every `log_freq`-th update, the first and the last, and each with an evaluation."""
        # The first one says that training has begun and how fast; the last one's loss is what
        # people look for.
        return (
            row.step % self._log_freq == 0
            or row.step in (self._start + 1, self._steps)
            or any(name.startswith("eval_") for name in row.extra)
        )

    def seen(self, step: int) -> None:
        """Start the clock at the first update: it alone pays for starting and compiling."""
        if self._first is None:
            self._first = (step, time.monotonic())

    def left(self, step: int) -> str:
        """`  eta 1:02:03` from the mean pace so far, evaluations and saves included."""
        if self._first is None or step <= self._first[0] or step >= self._steps:
            return ""
        pace = (time.monotonic() - self._first[1]) / (step - self._first[0])
        seconds = round(pace * (self._steps - step))
        return f"  eta {datetime.timedelta(seconds=seconds)}"


class LineSink:
    """Plain lines, for logs and pipes."""

    name = "the console"

    def __init__(
        self, *, steps: int, log_freq: int, start: int = 0, stream: IO[str] | None = None
    ) -> None:
        self._due, self._steps = Due(steps, start, log_freq), steps
        self._stream = stream or sys.stdout

    def emit(self, row: Row) -> None:
        """Print the updates that `Due` names, with the time that is left."""
        self._due.seen(row.step)
        if self._due.is_due(row):
            self.note(_line(row, self._steps) + self._due.left(row.step))

    def note(self, line: str) -> None:
        """Print the line."""
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is pending."""


class ProgressSink:
    """A progress bar on a terminal, with a line kept every `log_freq` updates."""

    name = "the console"

    def __init__(self, *, steps: int, start: int, log_freq: int) -> None:
        self._due, self._steps = Due(steps, start, log_freq), steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(),
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, numbers="")
        self._progress.start()

    def emit(self, row: Row) -> None:
        """Move the bar."""
        numbers = f"loss {row.loss:.4f}  lr {row.lr:.2e}  {row.samples_per_s:.0f} samples/s"
        self._progress.update(self._task, completed=row.step, numbers=numbers)
        if self._due.is_due(row):
            self.note(_line(row, self._steps))

    def note(self, line: str) -> None:
        """Print the line above the bar."""
        # A path in brackets must not be read as rich's markup.
        self._progress.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


@dataclass
class Sinks:
    """All sinks of the main rank; on the others it is empty and every call is free.

    A sink that fails is given up, which is said once. None of them ever ends a run.
    """

    members: list[Sink] = field(default_factory=list)

    def __post_init__(self) -> None:
        for sink in self.members:
            if isinstance(sink, JsonlSink):
                sink.tell = self.note

    def emit(self, row: Row) -> None:
        """Hand the row to every sink."""
        for sink in list(self.members):
            self._call(sink, lambda sink=sink: sink.emit(row))  # type: ignore[misc]

    def note(self, line: str) -> None:
        """Hand the line to every sink."""
        for sink in list(self.members):
            self._call(sink, lambda sink=sink: sink.note(line))  # type: ignore[misc]

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The console, which is the last of them, stays open for what the others say.
        for sink in list(self.members):
            self._call(sink, sink.close, ends=True)
        self.members.clear()

    def _call(self, sink: Sink, call: Callable[[], None], *, ends: bool = False) -> None:
        try:
            call()
        except Exception as error:  # of a library of others: it may be any
            if sink not in self.members:
                return  # given up meanwhile, by what was said of it
            self.members.remove(sink)
            if not ends:
                with contextlib.suppress(Exception):
                    sink.close()
            self._say_lost(sink, error)

    def _say_lost(self, sink: Sink, error: Exception) -> None:
        name = getattr(sink, "name", type(sink).__name__)
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        line = f"{name} is given up: {type(error).__name__}: {why}."
        if not isinstance(sink, JsonlSink):
            line += " The run goes on, and metrics.jsonl holds every update."
        if any(isinstance(member, LineSink | ProgressSink) for member in self.members):
            self.note(line)
        else:
            with contextlib.suppress(Exception):
                print(f"ptrain: {line}", file=sys.stderr, flush=True)


def console_sink(*, steps: int, start: int, log_freq: int) -> Sink:
    """A bar on a terminal, lines elsewhere."""
    # A file or a pipe would get the bar's escape codes.
    if sys.stdout.isatty():
        return ProgressSink(steps=steps, start=start, log_freq=log_freq)
    return LineSink(steps=steps, start=start, log_freq=log_freq)


class Stopwatch:
    """Seconds between calls, for throughput that includes waiting for data."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def _line(row: Row, steps: int) -> str:
    extra = "".join(f"  {k} {v:.4g}" for k, v in row.extra.items() if k not in COSTS)
    return (
        f"step {row.step:>{len(str(steps))}}/{steps}  loss {row.loss:.4f}  "
        f"grad_norm {row.grad_norm:.3f}  lr {row.lr:.2e}  {row.samples_per_s:.0f} samples/s{extra}"
    )
