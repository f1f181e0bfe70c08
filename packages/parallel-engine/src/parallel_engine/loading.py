"""Loaders: one that already yields this rank's batches is only moved, any other is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler

from parallel_config import ConfigError, Problem


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

    A batch sampler with `is_parallel_sampler = True` says that it yields this rank's own
    micro-batches already.

    Raises:
        ConfigError: the loader is sharded already by another sampler.
    """
    if loader is None:
        return None
    sampler = getattr(loader, "batch_sampler", None)
    if getattr(sampler, "is_parallel_sampler", False):
        return DeviceLoader(loader, device)
    inner = getattr(sampler, "sampler", None)
    if isinstance(inner, DistributedSampler):
        raise ConfigError(
            Problem(
                "loader",
                "has a DistributedSampler: its batches would be cut a second time.",
                "Give the engine the plain loader.",
            )
        )
    if not isinstance(loader, DataLoader):
        return DeviceLoader(loader, device)
    return accelerator.prepare_data_loader(loader)


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
