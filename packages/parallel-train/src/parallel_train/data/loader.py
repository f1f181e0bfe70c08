"""Batches ahead of time, without touching the model's random numbers."""

from __future__ import annotations

import signal

import torch
from torch.utils.data import DataLoader

from parallel_train.data.lerobot import Batch, LeRobotDataset
from parallel_train.data.order import GlobalBatchSampler


def build_loader(
    dataset: LeRobotDataset,
    sampler: GlobalBatchSampler,
    *,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """An endless loader of this rank's micro-batches.

    Its worker seeds come from a generator of its own, derived from the sampler's seed and
    position, because `iter(DataLoader)` otherwise draws from the model's.
    """
    generator = torch.Generator()
    generator.manual_seed(sampler.seed * 1_000_003 + sampler.start_samples)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        collate_fn=_identity,
        generator=generator,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker if num_workers else None,
    )


def _identity(batch: Batch) -> Batch:
    """The dataset already returns whole batches."""
    return batch


def _start_worker(worker: int) -> None:
    """A stop signal to the process group is the training process's to answer."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
