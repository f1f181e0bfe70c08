"""Ranks of a sharded model must run their wrap units in the same order.

Units of equal shape that run in a different order on two ranks pair their all-gathers: each rank
computes with a mix of both units' shards, and nothing raises. So each rank notes the order in which
its units ran, and the ranks compare a short hash of it after every window of micro-batches: before
the host waits for the device, whose collectives never end where the number of units differs.

The order is one over all ranks, not only over those that share a copy of the weights: replicas
reduce their gradients unit after unit, and pair them in the same blind way.
"""

from __future__ import annotations

import zlib
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel_engine.fqns import fqn
from parallel_engine.types import Hook

# Sum of squares of 20-bit numbers is exact in float64 for 8192 ranks.
_HASH_BITS = 20


class UnitOrder:
    """The order in which this rank's units ran since it was compared."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self._world_size = world_size
        self._ran: list[str] = []
        self._num_compared = 0
        for name, module in model.named_modules():
            if _is_unit(module):
                module.register_forward_pre_hook(self._note(fqn(model, name) or "(root)"))
        # With it a rank that left its last units out differs from one that is still before them.
        model.register_forward_hook(self._note("(end)"))

    def _note(self, name: str) -> Hook:
        def hook(module: nn.Module, *args: object) -> None:
            self._ran.append(name)

        # Traced, it would write the list while compiling and not afterwards.
        found: Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        return found

    def forget(self) -> None:
        """Begin anew."""
        self._ran.clear()
        self._num_compared += 1

    def progress(self) -> tuple[int, list[str]]:
        """How often the order was compared, and what ran since."""
        return self._num_compared, self._ran[:]

    def numbers(self) -> list[float]:
        """Two numbers whose sums over all ranks tell whether the orders are equal.

        All values are equal exactly when n * (sum of squares) == (sum) ** 2.
        """
        value = float(zlib.crc32("\n".join(self._ran).encode()) % (1 << _HASH_BITS))
        return [value, value * value]

    def settle(self, total: float, squares: float) -> str | None:
        """Collective: every rank, with the sums of `numbers()`. Begin anew.

        The same on every rank: the first unit that differs and the ranks' numbers, or None.
        """
        ran = self._ran[:]
        self.forget()
        if squares * self._world_size == total * total:
            return None
        orders: list[list[str]] = [[]] * self._world_size
        dist.all_gather_object(orders, ran)
        pairs = [list(zip_longest(orders[0], order, fillvalue="nothing")) for order in orders]
        return _explain(pairs) or "the hashes of the unit orders differ, but the orders do not"

    def difference(self) -> str | None:
        """Collective: every rank. Compare what ran since the last time, and begin anew."""
        sums = torch.tensor(self.numbers(), dtype=torch.float64)
        dist.all_reduce(sums)
        return self.settle(*sums.tolist())


def certain_difference(progress: list[tuple[int, list[str]]]) -> str | None:
    """The first place where the `progress` of two ranks shows different units, or None.

    A rank that ran fewer units may only be slow, so missing places do not count.
    """
    count, first = progress[0]
    ran = [order if compared == count else [] for compared, order in progress]
    return _explain([list(zip(first, order, strict=False)) for order in ran])


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _explain(pairs: list[list[tuple[str, str]]]) -> str | None:
    """The first difference, of the unit of rank 0 beside that of each rank, place by place."""
    for rank, places in enumerate(pairs):
        for place, (first, found) in enumerate(places):
            if first != found:
                return (
                    f"wrap units ran in a different order: at place {place} rank 0 ran {first!r}, "
                    f"rank {rank} {found!r}. Under sharding each would compute with the other's "
                    "shards, so the update was skipped. Let every rank run the same units in the "
                    "same order: a choice must not depend on a rank's own data or random numbers."
                )
    return None
