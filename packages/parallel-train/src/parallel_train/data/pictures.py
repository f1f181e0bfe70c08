"""Statistics of a camera from a sample of its frames, and the comparison with those of the file.

Pictures are read as bytes and scaled to [0, 1]; statistics are per channel, of shape [3, 1, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parallel_train.data.stats import Floats, Stats

FEW, MANY = 16, 128
"""Frames that a comparison and a computation of statistics take."""
_READ_AT_ONCE = 16
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PictureSample:
    """What a sample of frames tells of a camera."""

    stats: Stats
    frame_means: Floats
    """Per frame and channel: [frames, 3]."""

    @classmethod
    def of(
        cls, read: Callable[[npt.NDArray[np.int64]], Bytes], rows: npt.NDArray[np.int64], size: int
    ) -> PictureSample:
        """At most `size` of `rows`, spread evenly; `read` gives pictures [rows, 3, height, width].

        The same rows give the same values: each rank computes them for itself.
        """
        places = np.unique(np.linspace(0, len(rows) - 1, min(size, len(rows))).round().astype(int))
        means = []
        # A histogram per channel says everything about bytes, and the pictures need not stay.
        counts = np.zeros((3, 256), np.int64)
        for start in range(0, len(places), _READ_AT_ONCE):
            pictures = read(rows[places[start : start + _READ_AT_ONCE]])
            means.append(pictures.mean(axis=(2, 3), dtype=np.float64) / 255)
            for channel in range(3):
                counts[channel] += np.bincount(pictures[:, channel].reshape(-1), minlength=256)
        return cls(_from_counts(counts), np.concatenate(means))

    def disagreement(self, file: Stats, *, of_all: bool) -> str:
        """Where the statistics of the file cannot be those of the pictures, or "".

        `of_all` tells whether the sample is spread over the whole dataset. The bounds are wide:
        only another scale, another order of channels or another camera lie outside.
        """
        if file.max.max() > 1.01 or file.min.min() < -0.01:
            return (
                f"they reach from {file.min.min():.4g} to {file.max.max():.4g}, but pictures are "
                "scaled to [0, 1] before they are normalized"
            )
        spread = self.frame_means.std(axis=0)[:, None, None] / np.sqrt(len(self.frame_means))
        # Other episodes may look otherwise.
        allowed = (0.1 if of_all else 0.3) + 4 * spread
        # Three times, and a floor: a constant camera has a deviation of rounding alone.
        low, high = self.stats.std / 3 - 0.05, self.stats.std * 3 + 0.1
        for key, ours, wrong in (
            ("mean", file.mean, np.abs(file.mean - self.stats.mean) > allowed),
            ("std", file.std, ((file.std < low) | (file.std > high)) & of_all),
        ):
            if wrong.any():
                at = int(np.flatnonzero(wrong.reshape(-1))[0])
                found = getattr(self.stats, key).reshape(-1)[at]
                return (
                    f"{key} of channel {at} is {ours.reshape(-1)[at]:.4g}, but "
                    f"{len(self.frame_means)} frames of the camera give {found:.4g}"
                )
        return ""


def _from_counts(counts: npt.NDArray[np.int64]) -> Stats:
    values, number = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ values / number
    # Rounding may take the variance of a constant channel below 0.
    std = np.sqrt((counts @ values**2 / number - mean**2).clip(min=0))
    low = np.array([values[row.nonzero()[0][0]] for row in counts])
    high = np.array([values[row.nonzero()[0][-1]] for row in counts])
    shape = (3, 1, 1)
    return Stats(*(v.astype(np.float64).reshape(shape) for v in (mean, std, low, high)))
