"""Metrics over all ranks, whichever ranks and batches gave which.

A metric need not be there always: the error of a kind of sample is there when a batch holds some.
Its mean is over the batches that gave it, and it is left out of a report where none did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist


class MetricNames:
    """The names that all ranks know of, in one order; it grows when a rank meets a new one.

    So values of different names are never added up, and the names travel once, not at every update.
    """

    def __init__(self) -> None:
        self._known: list[str] = []

    def reduce(
        self, numbers: Sequence[float], metrics: Mapping[str, tuple[float, float]]
    ) -> tuple[list[float], dict[str, float]]:
        """Collective: every rank, as `sums`. The sums of `numbers`, and every metric's mean."""
        sums, pairs = self.sums(numbers, metrics)
        means = {name: total / weight for name, (total, weight) in pairs.items() if weight > 0}
        return sums, dict(sorted(means.items()))

    def sums(
        self, numbers: Sequence[float], metrics: Mapping[str, tuple[float, float]]
    ) -> tuple[list[float], dict[str, tuple[float, float]]]:
        """Collective: every rank, each with as many `numbers`. What they add up to.

        `metrics` holds, by name, this rank's weighted sum and the sum of its weights; what is
        returned holds every name that any rank knows of, in the same order on every rank. This is
        one small all-reduce, and two exchanges more where a rank has a name for the first time.
        """
        new = sorted(metrics.keys() - set(self._known))
        some_new, *sums = _summed([float(bool(new)), *numbers, *_pairs(self._known, metrics)])
        pairs = sums[len(numbers) :]
        if some_new:
            new = _union(new)
            self._known += new
            pairs += _summed(_pairs(new, metrics))
        found = zip(pairs[::2], pairs[1::2], strict=True)
        return sums[: len(numbers)], dict(zip(self._known, found, strict=True))


def _pairs(names: Sequence[str], metrics: Mapping[str, tuple[float, float]]) -> list[float]:
    return [number for name in names for number in metrics.get(name, (0.0, 0.0))]


def _summed(numbers: Sequence[float]) -> list[float]:
    """Collective: every rank."""
    if not dist.is_initialized():
        return list(numbers)
    vector = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(vector)
    found: list[float] = vector.tolist()
    return found


def _union(names: list[str]) -> list[str]:
    """Collective: every rank. The names of all ranks, sorted."""
    if not dist.is_initialized():
        return names
    lists: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(lists, names)
    return sorted({name for found in lists for name in found})
