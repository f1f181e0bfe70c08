"""The order of samples: a pure function of (seed, epoch) over the global batch.

The stream is one permutation after another. Update `g` takes the next `global batch` samples of
it; inside, micro-batch `m` takes a block of `batch_size x dp_world_size`, and rank `r` its `r`-th
part. So for one global batch the samples of an update are the same on any number of ranks, with or
without accumulation, and a position in samples is all that a resumed run needs to know.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from parallel_config import ConfigError, Problem
from torch.utils.data import Sampler


def epoch_permutation(num_samples: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Permutation of one epoch; draws from a generator of its own."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(num_samples)


def stream(num_samples: int, *, seed: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """Sample ids at the positions `start .. start + count - 1` of the endless stream."""
    parts: list[npt.NDArray[np.int64]] = []
    position = start
    while position < start + count:
        epoch, offset = divmod(position, num_samples)
        permutation = epoch_permutation(num_samples, seed=seed, epoch=epoch)
        part = permutation[offset : offset + start + count - position]
        parts.append(part)
        position += len(part)
    return np.concatenate(parts)


class GlobalBatchSampler(Sampler[list[int]]):
    """Endless index lists of this rank's micro-batches.

    Args:
        num_samples: samples in the dataset.
        batch_size: samples in one micro-batch of one rank.
        accumulation: micro-batches per update.
        dp_rank: which slice of the global batch this rank reads.
        dp_world_size: ranks that read different slices.
        seed: seed of the order.
        start_samples: position in the stream, in samples of all ranks.

    Raises:
        ConfigError: there are no samples.
    """

    is_parallel_sampler = True
    """Tells the engine that the batches are this rank's own already."""

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        accumulation: int = 1,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        start_samples: int = 0,
    ) -> None:
        if num_samples < 1:
            raise ConfigError(Problem("dataset.root", "has no samples to train on."))
        self.num_samples, self.batch_size, self.accumulation = num_samples, batch_size, accumulation
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.seed, self.start_samples = seed, start_samples
        if self.global_batch > num_samples and dp_rank == 0:
            warnings.warn(
                f"the global batch of {self.global_batch} samples is larger than the dataset of "
                f"{num_samples}: samples repeat within one update",
                stacklevel=2,
            )

    @property
    def global_batch(self) -> int:
        """Samples per update over all ranks."""
        return self.batch_size * self.accumulation * self.dp_world_size

    def __iter__(self) -> Iterator[list[int]]:
        block = self.batch_size * self.dp_world_size
        position = self.start_samples
        while True:
            samples = stream(
                self.num_samples, seed=self.seed, start=position, count=self.global_batch
            )
            for micro in range(self.accumulation):
                first = micro * block + self.dp_rank * self.batch_size
                yield samples[first : first + self.batch_size].tolist()
            position += self.global_batch
