"""The order of samples: one stream for a global batch, wherever it is cut or begins."""

from __future__ import annotations

import random
import warnings
from itertools import islice

import numpy as np
import pytest
import torch

from parallel_config import ConfigError
from parallel_train.data.order import GlobalBatchSampler, HeldOutSampler, epoch_permutation

PINNED = (
    [0, 7, 8, 2, 5, 9, 4, 6, 3, 1],
    [9, 4, 1, 7, 5, 8, 0, 6, 3, 2],
    [9, 8, 7, 4, 2, 0, 3, 6, 5, 1],
)


def global_stream(
    samples: int, micro: int, ranks: int, accumulation: int, start: int = 0, updates: int = 12
) -> list[list[int]]:
    """Samples of each update, sorted out of every rank's micro-batches in their order."""
    iterators = [
        iter(
            GlobalBatchSampler(
                samples, micro, accumulation, rank, ranks, seed=3, start_samples=start
            )
        )
        for rank in range(ranks)
    ]
    return [
        [i for _ in range(accumulation) for iterator in iterators for i in next(iterator)]
        for _ in range(updates)
    ]


@pytest.mark.parametrize(
    ("micro", "ranks", "accumulation"), [(4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2)]
)
def test_one_global_batch_is_one_stream_on_any_number_of_ranks(
    micro: int, ranks: int, accumulation: int
) -> None:
    assert global_stream(20, micro, ranks, accumulation) == global_stream(20, 8, 1, 1)


def test_each_epoch_is_a_permutation_and_no_batch_is_cut_at_its_end() -> None:
    batches = global_stream(20, 8, 1, 1, updates=10)
    assert {len(batch) for batch in batches} == {8}
    stream = [i for batch in batches for i in batch]
    epochs = [stream[k : k + 20] for k in range(0, 80, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("done", [0, 1, 5, 11])
def test_a_run_that_stopped_goes_on_where_it_was_on_another_number_of_ranks(done: int) -> None:
    whole = global_stream(20, 2, 2, 2, updates=14)
    rest = global_stream(20, 4, 1, 2, start=done * 8, updates=14 - done)
    assert whole[done:] == rest


def test_the_order_is_pinned() -> None:
    """A checkpoint of today must go on in the same order tomorrow."""
    assert epoch_permutation(10, seed=0, epoch=0).tolist() == PINNED[0]
    assert epoch_permutation(10, seed=0, epoch=1).tolist() == PINNED[1]
    assert epoch_permutation(10, seed=1, epoch=0).tolist() == PINNED[2]


def test_the_order_is_mixed_well() -> None:
    """Places of a sample over many epochs are spread evenly: chi-squared over ten bins."""
    places = np.stack([epoch_permutation(1000, seed=5, epoch=e).argsort() for e in range(200)])
    counts = np.stack([np.bincount(column // 100, minlength=10) for column in places.T])
    chi_squared = ((counts - 20.0) ** 2 / 20.0).sum(axis=1)
    assert 8.5 < chi_squared.mean() < 9.5  # nine degrees of freedom
    neighbours = np.abs(np.diff(epoch_permutation(1000, seed=5, epoch=0)))
    assert 300 < neighbours.mean() < 370  # a third of the range, as for independent places


def test_the_order_leaves_every_random_generator_alone() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    list(islice(iter(GlobalBatchSampler(20, 8, seed=1)), 10))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


def test_a_dataset_smaller_than_the_global_batch_is_allowed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"global batch of 8 .*2 ranks.* larger than .* of 3"):
        sampler = GlobalBatchSampler(3, 4, dp_world_size=2)
    assert [len(batch) for batch in islice(iter(sampler), 3)] == [4, 4, 4]


@pytest.mark.parametrize(("samples", "batch"), [(61, 100_000_000), (61, 4097), (5000, 5001)])
def test_a_micro_batch_beyond_the_dataset_is_refused_without_a_warning(samples, batch) -> None:
    with pytest.raises(ConfigError) as error:
        GlobalBatchSampler(samples, batch, accumulation=2, dp_world_size=2)
    assert str(error.value) == (
        f"batch_size = {batch} samples in one micro-batch of one rank, but the dataset has "
        f"{samples} to train on. Use --batch_size {samples} or less."
    )


@pytest.mark.parametrize(("samples", "batch"), [(3, 4096), (5000, 5000)])
def test_a_micro_batch_of_a_trial_or_of_the_whole_dataset_is_allowed(samples, batch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(next(iter(GlobalBatchSampler(samples, batch)))) == batch


def test_a_dataset_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset.root does not have any samples"):
        GlobalBatchSampler(0, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("samples", "most"), [(1, None), (7, None), (23, 9), (8, 100)])
def test_held_out_samples_are_read_once_by_as_many_batches_on_every_rank(ranks, samples, most):
    samplers = [HeldOutSampler(samples, 2, rank, ranks, most) for rank in range(ranks)]
    batches = [list(sampler) for sampler in samplers]
    assert len({len(found) for found in batches}) == 1
    assert all(len(found) == len(sampler) for found, sampler in zip(batches, samplers, strict=True))
    counted = [
        index
        for sampler, found in zip(samplers, batches, strict=True)
        for batch in found[: sampler.num_counted]
        for index in batch
    ]
    expected = min(samples, most or samples)
    assert len(counted) == len(set(counted)) == expected
    assert max(counted, default=0) >= samples - 1 - samples // expected
