"""Windows of micro-batches, one for each update, on as many ranks as there are.

A pass over the loader ends on all ranks at the same window. Otherwise a rank that reads one batch
more would wait in an update for ranks that have left the loop. Where every rank's loader has a
length, the ranks compare the lengths once. Elsewhere a rank reads one window ahead: it says in the
update of each window whether that is its last one.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, cast

import torch
import torch.distributed as dist

from parallel_config import ConfigError, Problem, agreed
from parallel_engine.agreement import any_rank
from parallel_engine.loaders import DeviceLoader, Ending, Moved, set_epoch
from parallel_engine.options import option
from parallel_engine.types import Batch

log = logging.getLogger("parallel_engine")
Told = Callable[[], AbstractContextManager[None]]
_ACCUMULATION = "accelerator.gradient_accumulation.steps"


def require_count(name: str, value: int | None, *, least: int, none: str) -> None:
    """Check an argument that is an integer or None.

    Raises:
        ConfigError: it is something else, or less than `least`.
    """
    if value is None or (type(value) is int and value >= least):
        return
    raise ConfigError(
        Problem(name, f"= {value!r}, but it must be an integer of at least {least}.", none)
    )


class Passes:
    """Of each loader, the number of its next pass; of an engine, what it has said already."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[weakref.ref[object], int]] = {}
        self.has_said = False

    def next_of(self, loader: object) -> int:
        """0 for a loader that was not read before, or that cannot be recognized, as a list."""
        known, number = self._next.get(id(loader), (None, 0))
        # An id is given again once its object is gone.
        return number if known is not None and known() is loader else 0

    def begin(self, loader: object, number: int) -> None:
        """Tell the loader and its samplers that pass `number` begins."""
        set_epoch(loader, number)
        try:
            self._next[id(loader)] = weakref.ref(loader), number + 1
        except TypeError:
            return  # a list or a dict, which has no `set_epoch` to be told anything by


@dataclass
class Windows(Generic[Batch]):
    """As `Engine.accumulate`. What the loader raises is raised within `told()`.

    Only the loader runs within: the caller's errors between two windows are the caller's.
    """

    loader: Iterable[Batch]
    steps: int
    device: torch.device
    told: Told
    passes: Passes
    epochs: int | None
    first_epoch: int | None
    world_size: int
    _num_read: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        # The loader within: a `DeviceLoader` would move a whole window before its first batch.
        loader = self.loader
        host = loader.loader if isinstance(loader, DeviceLoader) else loader
        batches = self._batches(host)
        if self.epochs is None:
            return self._endless(batches)
        if self.world_size == 1:
            return self._alone(batches)
        return self._on_ranks(host, batches)

    def _batches(self, host: Iterable[Batch]) -> Iterator[Batch]:
        """Micro-batches of one pass after the other."""
        first = self.first_epoch
        first = self.passes.next_of(host) if first is None else first
        numbers = itertools.count(first)
        for number in itertools.islice(numbers, self.epochs):
            with self.told():
                self.passes.begin(host, number)
                batches = iter(host)
            before = self._num_read
            while True:
                with self.told():
                    batch = next(batches, _END)
                if isinstance(batch, _End):
                    break
                self._num_read += 1
                yield batch
            # A pass without a batch would otherwise be begun again forever.
            if self._num_read == before and (before or self.epochs is None):
                with self.told():
                    raise ConfigError(_yields_nothing(is_first=not before))

    def _endless(self, batches: Iterator[Batch]) -> Iterator[Sequence[Batch]]:
        while True:
            yield Moved(self._window(batches), self.device)

    def _alone(self, batches: Iterator[Batch]) -> Iterator[Sequence[Batch]]:
        window = self._window(batches)
        self._require_one([self._num_read])
        while len(window) == self.steps:
            yield Moved(window, self.device)
            window = self._window(batches)
        self._say_left([len(window)])

    def _on_ranks(
        self, host: Iterable[Batch], batches: Iterator[Batch]
    ) -> Iterator[Sequence[Batch]]:
        """Collective: every rank. The same number of windows on each."""
        assert self.epochs is not None
        length = _length(host)
        lengths = self._gathered(None if length is None else length * self.epochs)
        known = [length for length in lengths if length is not None]
        if len(known) < self.world_size:
            yield from self._ahead(batches)
            return
        self._require_one(known)
        for _ in range(min(known) // self.steps):
            window = self._window(batches)
            if len(window) < self.steps:
                with self.told():
                    raise ConfigError(self._ends_early(cast(int, length)))
            yield Moved(window, self.device)
        taken = min(known) // self.steps * self.steps
        self._say_left([length - taken for length in known])

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Sequence[Batch]]:
        """Collective: every rank. One window is read ahead, to know which one is the last."""
        window = self._window(batches)
        self._require_one([found or 0 for found in self._gathered(len(window))])
        while True:
            following = self._window(batches)
            ending = Ending(len(following) < self.steps)
            yield Moved(window, self.device, ending)
            if ending.is_over is None:  # the caller made no update of it, or one of its own
                with self.told():
                    ending.is_over = any_rank(ending.is_mine)
            if ending.is_over:
                break
            window = following
        self._say_left([left or 0 for left in self._gathered(len(following))])

    def _window(self, batches: Iterator[Batch]) -> list[Batch]:
        return list(itertools.islice(batches, self.steps))

    def _gathered(self, number: int | None) -> list[int | None]:
        """Collective: every rank. Each rank's number."""
        found: list[int | None] = [None] * self.world_size
        with self.told():
            dist.all_gather_object(found, number)
        return found

    def _require_one(self, counts: Sequence[int]) -> None:
        """Every rank has the batches of one update, where `counts` are those of the ranks."""
        least = min(counts)
        if least >= self.steps:
            return
        fewer = option("gradient_accumulation.steps", f"{least} or less")
        where = f"on rank {list(counts).index(least)}" if len(counts) > 1 else "on this rank"
        if not least:
            raise agreed(ConfigError(Problem("loader", f"yields no batch {where}.")))
        raise agreed(
            ConfigError(
                Problem(
                    "loader",
                    f"yields {least} micro-batches {where}, but one update takes {self.steps} "
                    f"({_ACCUMULATION}).",
                    f"Use {fewer}, more data, or "
                    "accumulate(loader, epochs=None), which continues past the end of the data.",
                )
            )
        )

    def _ends_early(self, length: int) -> Problem:
        return Problem(
            "loader",
            f"has the length {length}, but it ended after {self._num_read} micro-batches of "
            f"{self.epochs} epochs; the ranks have agreed on the length.",
            "Let __len__ say how many batches it yields, or leave __len__ out.",
        )

    def _say_left(self, left: Sequence[int]) -> None:
        """Say once what no update has used. `left` holds the micro-batches of each rank."""
        if not any(left) or self.passes.has_said:
            return
        self.passes.has_said = True
        if self.world_size == 1 or dist.get_rank() == 0:
            shown = " and ".join(f"{n} on rank {rank}" for rank, n in enumerate(left) if n)
            log.info(
                "accumulate leaves out the last micro-batches (%s): an update takes %d of every "
                "rank. This is said once", shown, self.steps,
            )  # fmt: skip


class _End:
    """What a loader cannot yield: None and every other value may be a batch."""


_END = _End()


def _yields_nothing(*, is_first: bool) -> Problem:
    if is_first:
        return Problem("loader", "yields no batch on this rank.")
    return Problem(
        "loader",
        "yields nothing when it is started again, as a generator does, which runs once.",
        "Give an object whose __iter__ begins anew, such as a DataLoader.",
    )


def _length(loader: object) -> int | None:
    """Batches of one pass. None: not known, as for a DataLoader of a stream."""
    try:
        return len(cast(Sized, loader))
    except (TypeError, NotImplementedError):
        return None
