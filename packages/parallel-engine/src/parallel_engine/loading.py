"""Loaders: one that already yields this rank's batches is only moved, any other is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
)
from torch.utils.data import DataLoader, DistributedSampler

from parallel_config import ConfigError, Problem

_CUT = (
    DistributedSampler,
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
)
_SAMPLERS = ("batch_sampler", "sampler")


class DeviceLoader:
    """A loader of this rank's batches, moved to its device."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield to_device(batch, self.device)

    def __len__(self) -> int:
        return len(self.loader)


def prepare_loader(loader: Any, accelerator: Accelerator, device: torch.device) -> Any:
    """The loader as this rank reads it.

    A `DataLoader` is cut over the ranks by accelerate: rank r of n reads batches r, r + n, ... A
    batch sampler with `is_parallel_sampler = True` says that it yields this rank's own
    micro-batches already; so does any iterable that is no `DataLoader`. Those are only moved.

    Raises:
        ConfigError: the loader is cut over the ranks already.
    """
    if loader is None:
        return None
    if getattr(getattr(loader, "batch_sampler", None), "is_parallel_sampler", False):
        return DeviceLoader(loader, device)
    cut = next((part for part in _parts(loader) if _is_cut(part)), None)
    if cut is not None:
        raise ConfigError(
            Problem(
                "loader",
                f"is cut over the ranks already, by a {type(cut).__name__}: the engine would cut "
                "its batches a second time.",
                "Give the engine the plain loader.",
            )
        )
    if not isinstance(loader, DataLoader):
        return DeviceLoader(loader, device)
    return accelerator.prepare_data_loader(loader)


def _parts(loader: Any) -> Iterator[Any]:
    """The loader, its dataset, and its samplers with those that they wrap."""
    yield from (loader, getattr(loader, "dataset", None))
    waiting = [getattr(loader, name, None) for name in _SAMPLERS]
    while waiting:
        part = waiting.pop()
        if part is not None:
            yield part
            waiting += [getattr(part, name, None) for name in _SAMPLERS]


def _is_cut(part: Any) -> bool:
    """Whether it yields one rank's share: torch's sampler, accelerate's, or one like them."""
    return isinstance(part, _CUT) or (hasattr(part, "num_replicas") and hasattr(part, "rank"))


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors of a nested batch on `device`; everything else as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
