"""Ranks of a sharded model must run their wrap units in the same order.

Units of equal shape that run in a different order on two ranks pair their all-gathers: each rank
computes with a mix of both units' shards, and nothing raises. So each rank notes the order in which
its units ran, and a short hash of it rides on the reduction that every step makes anyway.

The order is one over all ranks, not only over those that share a copy of the weights: replicas
reduce their gradients unit after unit, and pair them in the same blind way.
"""

from __future__ import annotations

import zlib
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel_config import clean_fqn

# Sum of squares of 20-bit numbers is exact in float64 for 8192 ranks.
_HASH_BITS = 20


class UnitOrderError(RuntimeError):
    """Ranks ran their wrap units in a different order; raised on every rank before the update."""


class UnitOrder:
    """The order in which this rank's units ran since the last check."""

    def __init__(self, model: nn.Module) -> None:
        self._ran: list[str] = []
        for name, module in model.named_modules():
            if _is_unit(module):
                module.register_forward_pre_hook(self._note(clean_fqn(name) or "(root)"))

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._ran.append(name)

        return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def take(self) -> list[str]:
        """The units that ran, and begin anew."""
        ran = self._ran[:]
        self._ran.clear()
        return ran


def moments(ran: list[str]) -> list[float]:
    """A hash of the order and its square: after a sum over ranks they tell whether all agree."""
    value = float(zlib.crc32("\n".join(ran).encode()) % (1 << _HASH_BITS))
    return [value, value * value]


def require_same(sums: list[float], world_size: int, ran: list[str]) -> None:
    """Collective: every rank. Check the summed `moments`; they have no spread when all agree.

    Raises:
        UnitOrderError: on every rank, with the first unit that differs and the ranks' numbers.
    """
    total, squares = sums
    if squares * world_size == total * total:
        return
    orders: list[list[str]] = [[]] * world_size
    dist.all_gather_object(orders, ran)
    raise UnitOrderError(_explain(orders))


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _explain(orders: list[list[str]]) -> str:
    for rank, order in enumerate(orders):
        for place, (first, found) in enumerate(zip_longest(orders[0], order, fillvalue="nothing")):
            if first != found:
                return (
                    f"wrap units ran in a different order: at place {place} rank 0 ran {first!r}, "
                    f"rank {rank} {found!r}. Under sharding each would compute with the other's "
                    "shards, so the update was left out. Let every rank run the same units in the "
                    "same order: a choice must not depend on a rank's own data or random numbers."
                )
    return "the hashes of the unit orders differ, but the orders do not"
