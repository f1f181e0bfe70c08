"""The ranks that act together: who is main, what all know, and how one rank's error reaches all."""

from __future__ import annotations

import datetime
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from parallel_ckpt.errors import CheckpointError
from parallel_config import ReportedError, agreed

if TYPE_CHECKING:
    import torch.distributed as dist

MAIN = 0
DEADLINE_S = 1800.0
"""How long ranks wait for one another before they give up with an error."""
ENTRY_S = 300.0
"""How long a rank waits for the others to make the same call, before any of them does its work."""

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One process among those of its group; without a process group it is alone."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    """A gloo group of our own, so that nothing here meets the training's collectives."""

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
        try:
            group = dist.new_group(backend="gloo", timeout=entry)
        except RuntimeError as error:
            raise _not_all_here(call, error, time.monotonic() - begin) from error
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        _set_timeout(group, datetime.timedelta(seconds=deadline_s))
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def enter(self, call: str) -> None:
        """Collective: every rank. Meet before the work of a public call begins.

        Raises:
            CheckpointError: a rank is gone, or does not make the call within `ENTRY_S`: as when
                only the main rank makes it. The others would wait for their own deadlines.
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
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """Collective: every rank. On the main rank the values of all, in order of rank; else none.

        What only the main rank uses is not sent to everyone: of 1000 ranks each would hold 1000.
        """
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, dst=MAIN, group=self.group)
        return values or []

    def broadcast(self, value: T) -> T:
        """Collective: every rank. The main rank's value."""
        if self.group is None:
            return value
        import torch.distributed as dist

        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=MAIN, group=self.group)
        result: T = box[0]
        return result

    def attempt(self, act: Callable[[], T]) -> T:
        """Collective: every rank. Run `act`, which has no collectives, on each rank.

        Raises:
            ReportedError: the same on every rank when any rank's `act` failed.
        """
        result, cause, error = self._try(act)
        self._raise_first(self.all_gather(error), cause)
        return result[0]

    def attempt_all(self, act: Callable[[], T]) -> list[T]:
        """Collective: every rank. As `attempt`, with the results of all ranks."""
        result, cause, error = self._try(act)
        outcomes = self.all_gather((result, error))
        self._raise_first([found for _, found in outcomes], cause)
        return [found[0] for found, _ in outcomes]

    def attempt_for_main(self, act: Callable[[], T]) -> list[T]:
        """Collective: every rank. As `attempt`; the results of all on the main rank, else none."""
        result, cause, error = self._try(act)
        outcomes = self.gather((result, error))
        first = next((found for _, found in outcomes if found is not None), None)
        self._raise_first([self.broadcast(first)], cause)
        return [found[0] for found, _ in outcomes]

    def on_main(self, act: Callable[[], T]) -> T:
        """Collective: every rank. Run `act` on the main rank; all get its result or its error."""
        result, cause, error = self._try(act) if self.is_main else ([], None, None)
        result, error = self.broadcast((result, error))
        self._raise_first([error], cause)
        return result[0]

    def _try(self, act: Callable[[], T]) -> tuple[list[T], Exception | None, ReportedError | None]:
        try:
            return [act()], None, None
        except Exception as error:
            return [], error, describe(error, self.rank)

    def _raise_first(self, errors: Sequence[ReportedError | None], cause: Exception | None) -> None:
        for error in errors:
            if error is not None:
                # Alone, nobody else has it: whoever has peers by other means must still tell them.
                told = error if self.group is None else agreed(error)
                raise told from (None if cause is error else cause)


def _not_all_here(call: str, error: RuntimeError, waited_s: float) -> CheckpointError:
    absent = re.findall(r"Ranks? ([\d, ]+) failed to pass", str(error))
    who = f"ranks [{absent[-1].strip()}]" if absent else "another rank"
    if waited_s < 0.9 * ENTRY_S:
        return CheckpointError.of(call, f"was left by {who}, gone while others were in it.")
    return CheckpointError.of(
        call,
        f"was not made by {who} within {ENTRY_S:g} s.",
        "Every rank makes this call; it stands under no condition on the rank.",
    )


def _set_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    from torch.distributed import distributed_c10d

    # Renamed in torch 2.15, where the former name warns.
    name = "set_timeout" if hasattr(distributed_c10d, "set_timeout") else "_set_pg_timeout"
    getattr(distributed_c10d, name)(timeout, group)


def describe(error: BaseException, rank: int) -> ReportedError:
    """What all ranks are told of one rank's error."""
    if isinstance(error, ReportedError):
        return error
    if isinstance(error, OSError):
        where = error.filename or "file system"
        return CheckpointError.of(where, f"failed on rank {rank}: {error.strerror or error}.")
    return CheckpointError.of(f"rank {rank}", f"failed: {type(error).__name__}: {error}")


def _is_running() -> bool:
    """Whether there are other ranks. Reading a checkpoint alone does not pay for torch's import."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


_shared: dict[Any, Ranks] = {}
"""By process group."""


def all_ranks(call: str = "parallel_ckpt") -> Ranks:
    """Collective: every rank. The group that free functions share, formed at the first call.

    `call` is what an error calls the function that a rank does not make. The group is remembered
    per process group, because groups are scarce and are freed only together.
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
