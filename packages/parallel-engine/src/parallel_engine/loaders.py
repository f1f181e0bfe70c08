"""Loaders: one that already yields this rank's batches is only moved, any other is sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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
_END = object()


class DeviceLoader:
    """A loader of this rank's batches, moved to its device; otherwise as the loader within."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, while one is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield to_device(batch, self.device)

    def __len__(self) -> int:
        return len(self.loader)


class Moved(Sequence[Any]):
    """A window of micro-batches; each moves to the device when it is taken, not all at once."""

    def __init__(self, batches: Sequence[Any], device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Moved(self._batches[index], self._device)
        return to_device(self._batches[index], self._device)


def windows(
    loader: Iterable[Any],
    steps: int,
    device: torch.device,
    told: Callable[[], AbstractContextManager[None]],
    first_epoch: int,
) -> Iterator[Sequence[Any]]:
    """As `Engine.accumulate`, which see. What the loader raises is raised within `told()`."""
    host = loader.loader if isinstance(loader, DeviceLoader) else loader
    window: list[Any] = []
    for epoch in itertools.count(first_epoch):
        count = 0
        with told():
            set_epoch(host, epoch)
            batches = iter(host)
        while True:
            with told():
                batch = next(batches, _END)
            if batch is _END:
                break
            count += 1
            window.append(batch)
            if len(window) == steps:
                yield Moved(window, device)
                window = []
        if not count:
            with told():
                raise ConfigError(_yields_nothing(is_first=epoch == first_epoch))


def _yields_nothing(*, is_first: bool) -> Problem:
    if is_first:
        return Problem("loader", "yields no batch on this rank.")
    return Problem(
        "loader",
        "yields nothing when it is started again, as a generator does, which runs once.",
        "Give an object whose __iter__ begins anew, such as a DataLoader.",
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader and its samplers which pass over the data begins, as far as they ask."""
    owners = [loader, *(getattr(loader, name, None) for name in _SAMPLERS)]
    for tell in [getattr(owner, "set_epoch", None) for owner in owners]:
        if tell is not None:
            tell(epoch)


def prepare_loader(loader: Any, accelerator: Accelerator, device: torch.device) -> Any:
    """The loader as this rank reads it.

    A `DataLoader` is cut over the ranks by accelerate: rank r of n reads batches r, r + n, ..., and
    the last round is filled up with samples from the first, since every rank must take part. A
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
    cut_now = accelerator.prepare_data_loader(loader, device_placement=False)
    return DeviceLoader(cut_now, device)


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
    """Tensors of a nested batch on `device`, and whatever knows to move itself; the rest as it is.

    Also a tokenizer's BatchEncoding and a TensorDict, which stay what they are.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
