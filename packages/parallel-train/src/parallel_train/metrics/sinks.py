"""Where the numbers of a run go. The loop hands every sink the same row; sinks never train."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Value = int | float


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


_OWN_NAMES = {"mfu", "skipped", *(f.name for f in dataclasses.fields(Row))}


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
    """`metrics.jsonl`: a line per update, flushed at once so that a crash loses none."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def emit(self, row: Row) -> None:
        """Append the row."""
        self._file.write(row.to_json() + "\n")
        self._file.flush()

    def note(self, line: str) -> None:
        """Notes are for people."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LineSink:
    """Plain lines, for logs and pipes."""

    def __init__(self, *, steps: int, log_freq: int, stream: IO[str] | None = None) -> None:
        self._steps, self._log_freq = steps, log_freq
        self._stream = stream or sys.stdout

    def emit(self, row: Row) -> None:
        """Print every `log_freq`-th update and the last one."""
        # The last update too: its loss is what people look for.
        if row.step % self._log_freq == 0 or row.step == self._steps:
            self.note(_line(row, self._steps))

    def note(self, line: str) -> None:
        """Print the line."""
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is pending."""


class ProgressSink:
    """A progress bar on a terminal, with a line kept every `log_freq` updates."""

    def __init__(self, *, steps: int, start: int, log_freq: int) -> None:
        self._steps, self._log_freq = steps, log_freq
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
        if row.step % self._log_freq == 0 or row.step == self._steps:
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
    """All sinks of the main rank; on the others it is empty and every call is free."""

    members: list[Sink] = field(default_factory=list)

    def emit(self, row: Row) -> None:
        """Hand the row to every sink."""
        for sink in self.members:
            sink.emit(row)

    def note(self, line: str) -> None:
        """Hand the line to every sink."""
        for sink in self.members:
            sink.note(line)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # All are closed, whichever fails; and a full disk while closing must not hide the error
        # that ended the run.
        with contextlib.ExitStack() as stack:
            for sink in reversed(self.members):
                stack.callback(_close, sink, quietly=error is not None)


def _close(sink: Sink, *, quietly: bool) -> None:
    with contextlib.suppress(OSError) if quietly else contextlib.nullcontext():
        sink.close()


def console_sink(*, steps: int, start: int, log_freq: int) -> Sink:
    """A bar on a terminal, lines elsewhere."""
    # A file or a pipe would get the bar's escape codes.
    if sys.stdout.isatty():
        return ProgressSink(steps=steps, start=start, log_freq=log_freq)
    return LineSink(steps=steps, log_freq=log_freq)


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
    extra = "".join(f"  {k} {v:.4g}" for k, v in row.extra.items())
    return (
        f"step {row.step:>{len(str(steps))}}/{steps}  loss {row.loss:.4f}  "
        f"grad_norm {row.grad_norm:.3f}  lr {row.lr:.2e}  {row.samples_per_s:.0f} samples/s{extra}"
    )
