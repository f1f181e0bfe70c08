"""Reads, computes and compares the statistics of vector features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stats:
    """Over all frames; every array has the shape of one frame's value."""

    mean: Floats
    std: Floats
    """Population deviation (divided by the count)."""
    min: Floats
    max: Floats

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Stats:
        """Computed in float64 from values of shape [frames, ...]."""
        # Sums of millions of float32 numbers lose digits.
        wide = values.astype(np.float64)
        return cls(wide.mean(axis=0), wide.std(axis=0), wide.min(axis=0), wide.max(axis=0))

    @classmethod
    def from_plain(cls, entry: Mapping[str, Any], shape: tuple[int, ...]) -> Stats:
        """From one entry of `meta/stats.json`.

        Raises:
            ValueError: an array is missing, of another shape, or not finite.
        """
        arrays: dict[str, Floats] = {}
        for key in ("mean", "std", "min", "max"):
            found = np.asarray(entry.get(key, ()), dtype=np.float64)
            if found.shape != shape:
                raise ValueError(f"{key} has shape {list(found.shape)}, not {list(shape)}")
            if not np.isfinite(found).all():
                raise ValueError(f"{key} is not finite")
            arrays[key] = found
        return cls(**arrays)

    def disagreement(self, computed: Stats) -> str:
        """Where these differ from `computed` by more than a hundredth of the deviation, or "".

        Small differences are rounding, or another way of merging episodes.
        """
        size = np.maximum(np.abs(computed.min), np.abs(computed.max))
        # A hundredth of the deviation, float32 rounding of large values, and a floor for constants
        # at 0.
        allowed = 0.01 * computed.std + 1e-5 * size + 1e-7
        for key in ("mean", "std", "min", "max"):
            ours, theirs = getattr(self, key), getattr(computed, key)
            far = np.abs(ours - theirs) > allowed
            if far.any():
                at = int(np.flatnonzero(far.reshape(-1))[0])
                return (
                    f"{key}[{at}] is {ours.reshape(-1)[at]:.6g}, "
                    f"but the frames give {theirs.reshape(-1)[at]:.6g}"
                )
        return ""

    def too_narrow(self, computed: Stats) -> str:
        """Where the range leaves out episodes whose statistics are `computed`, or "".

        NaN in `computed` lies outside.
        """
        allowed = 0.01 * self.std + 1e-5 * np.maximum(np.abs(self.min), np.abs(self.max)) + 1e-7
        for key, inside in (
            ("min", computed.min >= self.min - allowed),
            ("max", computed.max <= self.max + allowed),
        ):
            if not inside.all():
                at = int(np.flatnonzero(~inside.reshape(-1))[0])
                ours, theirs = getattr(self, key).reshape(-1)[at], getattr(computed, key)
                return (
                    f"{key}[{at}] is {ours:.6g}, but the frames give {theirs.reshape(-1)[at]:.6g}"
                )
        return ""


def mode_of(name: str, modes: Mapping[str, str]) -> str:
    """How the feature `name` is normalized: the longest prefix in `modes` that matches decides."""
    matches = [prefix for prefix in modes if name.startswith(prefix)]
    return modes[max(matches, key=len)] if matches else "identity"
