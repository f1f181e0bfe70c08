"""Decides the order of samples: a pure function of (seed, epoch) over the global batch.

The stream is one permutation of the dataset after another; update `u` takes the next `global
batch` samples of it, wherever an epoch ends. Micro-batch `m` of an update is a block of
`batch_size x dp_world_size` samples, of which rank `r` reads the `r`-th part. So for one global
batch the samples of an update are the same on any number of ranks, with or without accumulation,
and a position in samples is all that a resumed run needs to know.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from parallel_config import ConfigError, Problem

Indices = npt.NDArray[np.int64]
# 2**64 / golden ratio, the increment of splitmix64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# A trial on a handful of frames may repeat them within a micro-batch, as far as this. Beyond it the
# number is a slip of the hand, and the micro-batch would be built until the memory ends.
_MOST_REPEATING = 4096


def epoch_permutation(num_samples: int, *, seed: int, epoch: int) -> Indices:
    """The samples of one epoch in order.

    Sorted by a hash instead of shuffled by numpy: numpy may change its shuffles between
    versions, and a resumed run must go on in the same order.
    """
    # Mixed twice: seed 0, epoch 1 and seed 1, epoch 0 must not give one key.
    keys = _mix(np.arange(num_samples, dtype=np.uint64) * _GOLDEN + key_of(seed, epoch))
    # No two keys are equal, since every step of `_mix` can be undone: there is one order.
    return np.argsort(keys, kind="stable")


def key_of(*numbers: int) -> np.uint64:
    """One number from several: changing any of them gives another stream."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = _mix(key + np.array([number], np.uint64))
    return np.uint64(key[0])


def uniform(key: np.uint64, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1) that depend on the key alone: the same on every machine."""
    bits = _mix(np.arange(count, dtype=np.uint64) * _GOLDEN + key)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53  # what a float64 can hold


class Samples(list[int]):
    """Numbers of samples that stand one after another in the stream, the first at `first`."""

    def __init__(self, samples: Iterable[int], first: int) -> None:
        super().__init__(samples)
        self.first = first


class GlobalBatchSampler(Sampler[list[int]]):
    """Endless iterator over the `Samples` of this rank's micro-batches.

    Every `iter` starts at `start_samples` again. Nothing is drawn from a random generator.

    Args:
        num_samples: Samples in the dataset.
        batch_size: Samples in one micro-batch of one rank.
        accumulation: Micro-batches per update.
        dp_rank: Which part of the global batch this rank reads.
        dp_world_size: Ranks that read different parts.
        seed: Of the order.
        start_samples: Position in the stream, counted in samples of all ranks.

    Raises:
        ConfigError: the dataset does not have any samples, or one micro-batch is larger than it
            and than 4096 samples.
    """

    is_parallel_sampler = True
    """Tells the engine that these are this rank's own batches, so that it shards no further."""

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accumulation: int = 1,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        start_samples: int = 0,
    ) -> None:
        if num_samples < 1:
            raise ConfigError(
                Problem(
                    "dataset.root", "does not have any samples to train on.", "Use another dataset."
                )
            )
        if batch_size > max(num_samples, _MOST_REPEATING):
            raise ConfigError(
                Problem(
                    "batch_size",
                    f"= {batch_size} samples in one micro-batch of one rank, but the dataset has "
                    f"{num_samples} to train on.",
                    f"Use --batch_size {num_samples} or less.",
                )
            )
        self.num_samples, self.batch_size, self.accumulation = num_samples, batch_size, accumulation
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.seed, self.start_samples = seed, start_samples
        # One rank warns: every other would say the same.
        if self.global_batch > num_samples and dp_rank == 0:
            warnings.warn(
                f"The global batch of {self.global_batch} samples (batch_size {batch_size} x "
                f"{dp_world_size} ranks x accumulation {accumulation}) is larger than the dataset "
                f"of {num_samples}: samples repeat within one update.",
                stacklevel=2,
            )

    @property
    def global_batch(self) -> int:
        """Samples of one update, over all ranks."""
        return self.batch_size * self.dp_world_size * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        # One micro-batch of all ranks; with accumulation an update takes several blocks in a row.
        block = self.batch_size * self.dp_world_size
        position = self.start_samples + self.dp_rank * self.batch_size
        # One permutation is kept at a time: a micro-batch may end one epoch and begin the next.
        epoch, order = -1, np.empty(0, np.int64)
        while True:
            samples: list[int] = []
            while len(samples) < self.batch_size:
                wanted, offset = divmod(position + len(samples), self.num_samples)
                # Sorting is done once per epoch, not per batch.
                if wanted != epoch:
                    epoch = wanted
                    order = epoch_permutation(self.num_samples, seed=self.seed, epoch=epoch)
                missing = self.batch_size - len(samples)
                samples.extend(order[offset : offset + missing].tolist())
            yield Samples(samples, position)
            position += block


class HeldOutSampler(Sampler[list[int]]):
    """Index lists of this rank's batches of a whole dataset in order, once, for evaluation.

    Every rank has as many batches; one whose samples end early repeats the first sample in batches
    after `num_counted`.

    Args:
        num_samples: Samples in the dataset.
        batch_size: Samples in one batch of one rank.
        dp_rank: Which part this rank reads.
        dp_world_size: Ranks that read different parts.
        max_samples: Take this many, spread evenly; None takes all.
    """

    is_parallel_sampler = True
    # What `build_loader` seeds workers from.
    seed = start_samples = 0

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        max_samples: int | None = None,
    ) -> None:
        count = min(num_samples, max_samples or num_samples)
        # Whole numbers: the same samples on any machine.
        self._samples = [index * num_samples // count for index in range(count)]
        self._starts = range(dp_rank * batch_size, count, batch_size * dp_world_size)
        # Rounded up, and the same on every rank: a sharded forward is a collective.
        self._num_batches = -(-count // (batch_size * dp_world_size))
        self._batch_size, self.dp_rank = batch_size, dp_rank

    @property
    def num_counted(self) -> int:
        """Batches of this rank that hold samples of its own."""
        return len(self._starts)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for start in self._starts:
            yield self._samples[start : start + self._batch_size]
        for _ in range(self._num_batches - self.num_counted):
            yield self._samples[:1]


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the input moves every bit of the output."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
