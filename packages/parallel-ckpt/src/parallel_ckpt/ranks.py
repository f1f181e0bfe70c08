"""Agreement between ranks: one error becomes the error of all, one value the value of all.

The words are those of the engine: `agree`, `together`, `from_main`. They are methods here, because
a checkpoint has process groups of its own: one for its calls, one for its background thread.
No collective stands under a condition on the rank. Work that only the main rank can do is a
function that every rank hands to `from_main`.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from parallel_ckpt.errors import CheckpointError, RankLost
from parallel_config import ReportedError, agreed

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MAIN = 0
DEADLINE_S = 1800.0
"""How long ranks wait for one another before they give up with an error."""
ENTRY_S = 300.0
"""How long a rank waits for the others to make the same call, before any of them does its work."""
BEAT_S = 10.0
"""How often the main rank tells those that wait for it that it is alive."""

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One process of a process group. Without a group it is alone, and no method communicates."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    """A gloo group of our own: the collectives of the training can never be taken for ours."""
    deadline_s: float = DEADLINE_S
    """How long this rank waits for another one in a collective or a transfer."""

    @classmethod
    def join(cls, deadline_s: float = DEADLINE_S, call: str = "parallel_ckpt") -> Ranks:
        """Collective: every rank. Form a group of all ranks with a deadline of its own.

        Raises:
            CheckpointError: as for `enter`.
        """
        if not _is_running():
            return cls()
        import torch.distributed as dist

        begin, entry = time.monotonic(), datetime.timedelta(seconds=ENTRY_S)
        # Forming the group is the first meeting, so it has the short limit. What comes after may
        # wait for a disk, and gets the long one.
        try:
            group = dist.new_group(backend="gloo", timeout=entry)
        except RuntimeError as error:
            raise _not_all_here(call, error, time.monotonic() - begin) from error
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        _set_timeout(group, datetime.timedelta(seconds=deadline_s))
        return cls(dist.get_rank(), dist.get_world_size(), group, deadline_s)

    def enter(self, call: str) -> None:
        """Collective: every rank. Meet before the work of a public call begins.

        Raises:
            CheckpointError: a rank is gone, or does not make the call within `ENTRY_S`. This
                happens when only the main rank makes it. Without this meeting the ranks would wait
                until their deadline.
        """
        if self.group is None:
            return
        import torch.distributed as dist

        begin, timeout = time.monotonic(), datetime.timedelta(seconds=ENTRY_S)
        try:
            dist.monitored_barrier(self.group, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise _not_all_here(call, error, time.monotonic() - begin) from error

    def leave(self) -> None:
        """Collective: every rank. Dissolve the group, unless all groups are gone already."""
        if self.group is not None and _is_running():
            import torch.distributed as dist

            dist.destroy_process_group(self.group)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what exists once."""
        return self.rank == MAIN

    def all_gather(self, value: T) -> list[T]:
        """Collective: every rank. The values of all ranks, in order of rank."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        with self._waiting():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """Collective: every rank. The values of all ranks on the main rank, [] on the others.

        What only the main rank uses is not sent to all: each of 1000 ranks would hold 1000 values.
        """
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        with self._waiting():
            dist.gather_object(value, values, dst=MAIN, group=self.group)
        return values or []

    def broadcast(self, value: T) -> T:
        """Collective: every rank. The main rank's value."""
        if self.group is None:
            return value
        import torch.distributed as dist

        box: list[Any] = [value]
        with self._waiting():
            dist.broadcast_object_list(box, src=MAIN, group=self.group)
        result: T = box[0]
        return result

    def send(self, data: torch.Tensor) -> None:
        """Send a contiguous host tensor to the main rank, which calls `receive`."""
        import torch.distributed as dist

        with self._waiting():
            self._finish(dist.isend(data, dst=MAIN, group=self.group))

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Main rank: fill a contiguous host tensor with what rank `source` sends."""
        import torch.distributed as dist

        with self._waiting():
            self._finish(dist.irecv(data, src=source, group=self.group))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Say of a rank that is gone or late what it means, where gloo tells of its sockets."""
        begin = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise self._not_met(error, time.monotonic() - begin) from error

    def _not_met(self, error: Exception, waited_s: float) -> RankLost:
        # torch calls a group that was destroyed an invalid one.
        if isinstance(error, ValueError) or not _is_running():
            return RankLost.of(
                "process group",
                "was destroyed while the ranks worked on a checkpoint.",
                "Call CheckpointSaver.wait or close before destroy_process_group.",
            )
        if waited_s < 0.9 * self.deadline_s:
            return RankLost.of(
                f"rank {self.rank}",
                "has lost another rank. It ended while the ranks worked on a checkpoint.",
                "The error of that rank says why.",
            )
        return RankLost.of(
            f"rank {self.rank}",
            f"has waited {self.deadline_s:g} s for another rank, which is stuck or slow.",
            "Use CheckpointSaver(deadline_s=...) if it needs longer.",
        )

    def _finish(self, work: dist.Work | None) -> None:
        assert work is not None  # None only stands for a rank that is outside of the group
        # gloo gives a transfer the limit that the group was made with, which is that of forming
        # it. A later `_set_timeout` changes collectives alone, so each wait names its own.
        work.wait(datetime.timedelta(seconds=self.deadline_s))

    def agree(self, error: Exception | None) -> None:
        """Collective: every rank. Raise the first rank's error on all ranks, or return on all.

        Raises:
            ReportedError: the error of the lowest rank that has one, the same on every rank.
        """
        self._raise_first(self.all_gather(self._portable(error)), error)

    def together(self, fn: Callable[[], T]) -> T:
        """Collective: every rank. `fn()` on every rank; an error on one is raised on all.

        `fn` has no collectives of its own: a rank that failed before them would meet the others in
        the wrong one.

        Raises:
            ReportedError: as for `agree`.
        """
        result, error = _try(fn)
        self.agree(error)
        return result[0]

    def together_all(self, fn: Callable[[], T]) -> list[T]:
        """Collective: every rank. As `together`, with the results of all ranks."""
        result, error = _try(fn)
        outcomes = self.all_gather((result, self._portable(error)))
        self._raise_first([found for _, found in outcomes], error)
        return [found[0] for found, _ in outcomes]

    def together_for_main(self, fn: Callable[[], T]) -> list[T]:
        """Collective: every rank. As `together_all` on the main rank, [] on the others."""
        result, error = _try(fn)
        outcomes = self.gather((result, self._portable(error)))
        first = next((found for _, found in outcomes if found is not None), None)
        self._raise_first([self.broadcast(first)], error)
        return [found[0] for found, _ in outcomes]

    def from_main(self, fn: Callable[[], T]) -> T:
        """Collective: every rank. `fn()` on the main rank; its value or its error is that of all.

        The value is pickled.
        """
        result, error = _try(fn) if self.is_main else ([], None)
        result, found = self.broadcast((result, self._portable(error)))
        self._raise_first([found], error)
        return result[0]

    def while_main(
        self, fn: Callable[[], object], on_slow: Callable[[], object] = lambda: None
    ) -> None:
        """Collective: every rank. Run `fn()` on the main rank, however long it takes.

        The others wait, and hear every few seconds that the main rank is alive. So the deadline
        stands for a rank that is gone, not for the work. `on_slow()` is called once on a thread of
        the main rank, when the work takes longer than the deadline. `fn` has no collectives.

        Raises:
            RankLost: another rank ended in the meantime.
        """
        if self.group is None:
            fn()
        elif not self.is_main:
            while self.broadcast(True):
                pass
        else:
            done, lost = threading.Event(), list[RankLost]()
            beat = threading.Thread(target=self._beat, args=(done, lost, on_slow))
            beat.start()
            try:
                fn()
            finally:
                done.set()
                beat.join()
            if lost:
                raise lost[0]

    def _beat(
        self, done: threading.Event, lost: list[RankLost], on_slow: Callable[[], object]
    ) -> None:
        """Tell the others whether the main rank still works, until it does not."""
        slow_at = time.monotonic() + self.deadline_s
        try:
            while not done.wait(min(BEAT_S, self.deadline_s / 4)):
                self.broadcast(True)
                if time.monotonic() > slow_at:
                    slow_at = math.inf
                    on_slow()
            self.broadcast(False)
        except RankLost as error:
            lost.append(error)

    def _portable(self, error: Exception | None) -> ReportedError | None:
        return None if error is None else describe(error, self.rank)

    def _raise_first(self, errors: Sequence[ReportedError | None], cause: Exception | None) -> None:
        for error in errors:
            if error is not None:
                # An error of one process alone is not marked as agreed: its caller may have peers
                # by other means, and must still tell them.
                told = error if self.group is None else agreed(error)
                raise told from (None if cause is error else cause)


def _try(fn: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """The result in a list, which is empty after an error: None may be a result."""
    try:
        return [fn()], None
    except Exception as error:
        return [], error


def _not_all_here(call: str, error: RuntimeError, waited_s: float) -> CheckpointError:
    absent = re.findall(r"Ranks? ([\d, ]+) failed to pass", str(error))
    who = f"ranks [{absent[-1].strip()}]" if absent else "another rank"
    if waited_s < 0.9 * ENTRY_S:
        return CheckpointError.of(call, f"was left by {who}, which ended while others were in it.")
    return CheckpointError.of(
        call,
        f"was not made by {who} within {ENTRY_S:g} s.",
        "Every rank must make this call. Do not put it under a condition on the rank.",
    )


def _set_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    from torch.distributed import distributed_c10d

    # Renamed in torch 2.15, where the former name warns.
    name = "set_timeout" if hasattr(distributed_c10d, "set_timeout") else "_set_pg_timeout"
    getattr(distributed_c10d, name)(timeout, group)


def describe(error: Exception, rank: int) -> ReportedError:
    """One rank's error as all ranks raise it."""
    if isinstance(error, ReportedError):
        return error
    if isinstance(error, OSError):
        where = error.filename or "file system"
        return CheckpointError.of(where, f"failed on rank {rank}: {error.strerror or error}.")
    return CheckpointError.of(f"rank {rank}", f"failed: {type(error).__name__}: {error}")


def _is_running() -> bool:
    """Whether there is a process group. A lone process that reads does not import torch."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


_shared: dict[Any, Ranks] = {}
"""By process group."""


def all_ranks(call: str = "parallel_ckpt") -> Ranks:
    """Collective: every rank. The group that free functions share, formed at the first call.

    `call` names the public function in the error about a rank that does not make it. The group is
    kept for as long as the process group lives, because forming one is slow and sockets are scarce.
    """
    if not _is_running():
        return Ranks()
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    if world not in _shared:
        _shared.clear()
        _shared[world] = Ranks.join(call=call)
    _shared[world].enter(call)
    return _shared[world]
