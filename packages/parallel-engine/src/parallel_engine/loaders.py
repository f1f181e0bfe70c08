"""Loaders: one that already yields this rank's batches is only moved, any other is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, overload

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
from parallel_engine.types import Batch

Loader = TypeVar("Loader")
_CUT = (
    DistributedSampler,
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
)
_SAMPLERS = ("batch_sampler", "sampler")


class DeviceLoader(Generic[Batch]):
    """A loader of this rank's batches, moved to its device; otherwise as the loader within."""

    def __init__(self, loader: Iterable[Batch], device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __getattr__(self, name: str) -> Any:  # whatever the loader within has
        if name == "loader":  # while this object is unpickled it is not there yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            yield to_device(batch, self.device)

    def __len__(self) -> int:
        return len(cast(Sized, self.loader))


@dataclass
class Ending:
    """Whether a window is the last one, where the ranks cannot know that beforehand."""

    is_mine: bool
    """Whether this rank has no further window."""
    is_over: bool | None = None
    """Whether any rank has none. None until the ranks have said so in an update."""


class Moved(Sequence[Batch]):
    """A window of micro-batches; each moves to the device when it is taken, not all at once."""

    def __init__(
        self, batches: Sequence[Batch], device: torch.device, ending: Ending | None = None
    ) -> None:
        self._batches, self.device, self.ending = batches, device, ending

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Moved[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Moved[Batch]:
        if isinstance(index, slice):
            return Moved(self._batches[index], self.device)
        return to_device(self._batches[index], self.device)


def on_device(batches: Sequence[Batch], device: torch.device) -> Sequence[Batch]:
    """The micro-batches, each of which moves once: a window of `accumulate` does so by itself."""
    if isinstance(batches, Moved) and batches.device == device:
        return batches
    return Moved(batches, device)


def set_epoch(loader: object, epoch: int) -> None:
    """Tell the loader and its samplers which pass over the data begins, if they want to know."""
    owners = [loader, *(getattr(loader, name, None) for name in _SAMPLERS)]
    for tell in [getattr(owner, "set_epoch", None) for owner in owners]:
        if tell is not None:
            tell(epoch)


def prepare_loader(loader: Loader, accelerator: Accelerator, device: torch.device) -> Loader:
    """The loader as this rank reads it; it stands in for the given one. None stays None.

    accelerate distributes the batches of a `DataLoader` over the ranks: rank r of n reads batches
    r, r + n, ..., and the last round is filled up with samples from the first, since every rank
    must take part. A batch sampler with `is_parallel_sampler = True` says that it yields this
    rank's own micro-batches already; every other iterable does so too. Those are only moved.

    Raises:
        ConfigError: the loader is cut over the ranks already.
    """
    # What is returned has the attributes of what was given, which no type can say.
    return cast(Loader, _prepared(loader, accelerator, device))


def _prepared(
    loader: Any, accelerator: Accelerator, device: torch.device
) -> DeviceLoader[object] | None:
    if loader is None:
        return None
    if getattr(getattr(loader, "batch_sampler", None), "is_parallel_sampler", False):
        return DeviceLoader(loader, device)
    cut = next((part for part in _parts(loader) if _is_cut(part)), None)
    if cut is not None:
        raise ConfigError(
            Problem(
                "loader",
                f"is already split over the ranks by a {type(cut).__name__}: the engine would "
                "split its batches a second time.",
                "Give the engine the plain loader.",
            )
        )
    if not isinstance(loader, DataLoader):
        return DeviceLoader(loader, device)
    cut_now = accelerator.prepare_data_loader(loader, device_placement=False)
    return DeviceLoader(cut_now, device)


def _parts(loader: object) -> Iterator[object]:
    """The loader, its dataset, and its samplers with those that they wrap."""
    yield from (loader, getattr(loader, "dataset", None))
    waiting = [getattr(loader, name, None) for name in _SAMPLERS]
    while waiting:
        part = waiting.pop()
        if part is not None:
            yield part
            waiting += [getattr(part, name, None) for name in _SAMPLERS]


def _is_cut(part: object) -> bool:
    """Whether it yields one rank's share: torch's sampler, accelerate's, or one like them."""
    return isinstance(part, _CUT) or (hasattr(part, "num_replicas") and hasattr(part, "rank"))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Tensors of a nested batch on `device`, and every object that can move itself.

    The rest stays as it is. A tokenizer's BatchEncoding and a TensorDict keep their type.
    """
    return cast(Batch, _to_device(batch, device))


def _to_device(batch: Any, device: torch.device) -> Any:  # of each type the same type
    if isinstance(batch, torch.Tensor):
        # Only towards a device: a copy to the host would be read before it has arrived.
        return batch.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(_to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch
