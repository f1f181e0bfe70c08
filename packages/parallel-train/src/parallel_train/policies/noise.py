"""Noise that belongs to a sample, for losses that are compared. It is the same at every evaluation,
on any number of ranks and in batches of any size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# (sqrt(5) - 1) / 2
_GOLDEN = 0.6180339887498949


def noise_of_samples(index_B: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Normal noise shaped like every [B, ...] of `like`, a function of each sample's index alone.

    Drawn on the CPU, whatever the device, so that devices agree.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in like}
    # A generator per sample: a batch of any size, in any order, draws the same for it.
    for index in index_B.tolist():
        generator = torch.Generator().manual_seed(index)
        for name, value in like.items():
            parts[name].append(torch.randn(value.shape[1:], generator=generator))
    # Drawn in fp32, then cast: narrow runs see the same noise, rounded.
    return {name: torch.stack(part).to(like[name]) for name, part in parts.items()}


def times_of_samples(index_B: Tensor) -> Tensor:
    """A time in [0, 1) for each sample, float32 [B].

    Multiples of the golden ratio: those of any run of samples are spread evenly, which a random
    draw of as many is not.
    """
    # In float64: the fraction of a large product has few digits left in float32. The half keeps
    # sample 0 from time 0.
    return (((index_B.double() + 0.5) * _GOLDEN) % 1).float()
