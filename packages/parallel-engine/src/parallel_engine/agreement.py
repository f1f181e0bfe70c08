"""Agreement between ranks: an error or a value of one rank becomes that of every rank.

A collective never stands under a rank condition. What only the main rank can know or do is a
function that is given to `from_main`, and every rank calls `from_main`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from parallel_config import agreed

T = TypeVar("T")


def agree(error: BaseException | None) -> None:
    """Collective: every rank. Raise the first rank's error on all ranks, or return on all.

    Raises:
        Exception: the error of the lowest rank that has one, the same on every rank.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    errors: list[BaseException | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, _portable(error))
    for rank, found in enumerate(errors):
        if found is not None:
            # The rank that failed raises its own error, which still has its traceback.
            raise agreed(error if error is not None and rank == dist.get_rank() else found)


def together(fn: Callable[[], T]) -> T:
    """Collective: every rank. Call `fn()` on every rank; an error on one is raised on all.

    `fn` must not contain collectives: a rank that fails before them goes on to the agreement, and
    the other ranks would take that for theirs. A function with collectives goes under
    `Engine.telling_peers()`.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = fn()
    except Exception as caught:
        error = caught
    agree(error)
    return cast(T, value)  # without an error `fn` has returned


def from_main(fn: Callable[[], T]) -> T:
    """Collective: every rank. Run `fn` on the main rank; every rank gets its value or its error.

    The value is pickled.
    """
    if not dist.is_initialized():
        return fn()
    outcome: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [fn(), None]
        except Exception as error:
            outcome = [None, _portable(error)]
    dist.broadcast_object_list(outcome, src=0)
    value, failure = outcome
    if isinstance(failure, BaseException):
        raise agreed(failure)
    return cast(T, value)


def any_rank(flag: bool) -> bool:
    """Collective: every rank. Whether the flag is set on any rank."""
    if not dist.is_initialized():
        return flag
    value = torch.tensor(int(flag))
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def _portable(error: BaseException | None) -> BaseException | None:
    """The error itself where it survives pickling; otherwise a RuntimeError with its text."""
    if error is None:
        return None
    try:
        # Loading is tried too: an exception whose __init__ takes other arguments than its `args`
        # can be dumped, and would fail on the ranks that receive it.
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
