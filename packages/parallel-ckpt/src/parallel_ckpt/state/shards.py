"""What this rank holds of each tensor, however it is sharded: the one view the package has.

A `Shard` says in plain numbers which box of a global tensor lies in which local memory. Saving and
loading need nothing else, so one code path serves single, DDP, FSDP2 and HSDP, and a copy of a
shard in host memory can be saved as the original can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parameter import is_lazy

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.box import Box


@dataclass(frozen=True)
class Shard:
    """One box of one global tensor, in this rank's memory."""

    local: torch.Tensor
    """The box itself: never a DTensor, never needs a gradient; shares memory with the original."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the global tensor, one per dim."""
    holders: tuple[int, ...] = ()
    """Ranks that hold this very box; empty when every rank does."""
    is_buffer: bool = False
    """Whether it is a buffer: no collective of the training keeps those alike on its holders."""

    @property
    def box(self) -> Box:
        """Its place in the global tensor."""
        return Box(self.offsets, tuple(self.local.shape))

    @property
    def global_bytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * self.local.element_size()

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing of a tensor that has something."""
        return self.local.numel() == 0 and math.prod(self.shape) > 0

    def with_local(self, local: torch.Tensor) -> Shard:
        """The same box in other memory."""
        return replace(self, local=local)


def shard_of(tensor: torch.Tensor, name: str) -> Shard:
    """Box that this rank holds of a tensor or DTensor; no collective, nothing is copied.

    Raises:
        CheckpointError: a DTensor holds pending sums, so that its value is not yet known, or the
            tensor's values are not elements in memory.
    """
    if not isinstance(tensor, DTensor):
        local = _plain(tensor, name)
        return Shard(local, tuple(tensor.shape), (0,) * tensor.ndim)
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError.of(name, f"has pending sums over ranks ({tensor.placements}).")
    mesh = tensor.device_mesh
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    local = _plain(tensor.to_local(), name)
    offsets = tuple(offsets) if local.numel() else (0,) * tensor.ndim
    return Shard(local, tuple(tensor.shape), offsets, _holders(tensor))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor in its own memory, as a flat uint8 tensor."""
    # One element alone is contiguous whatever its stride is, but `view` asks for a stride of 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The same memory as a tensor of no other class, without a gradient.

    A class that only adds methods goes, and nothing is lost. One that dispatches keeps its values
    elsewhere than in the elements of a plain tensor; saved, it would be an object to unpickle.
    """
    kind = type(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    elif is_lazy(tensor):
        raise CheckpointError.of(
            name, "does not have a shape yet: the module is lazy.", "Run its forward once."
        )
    elif kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise CheckpointError.of(
            name,
            f"is a {kind.__name__}, whose values are not plain elements in memory, so that no "
            "checkpoint can hold it.",
            "Keep its parts as parameters or buffers.",
        )
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise CheckpointError.of(
                name, f"is a {layout} tensor, but only dense ones can be kept.", "Make it dense."
            )
        local = tensor.detach()
        return local if type(local) is torch.Tensor else local.as_subclass(torch.Tensor)


def _holders(tensor: DTensor) -> tuple[int, ...]:
    """Ranks whose mesh coordinate differs from ours only along axes that replicate."""
    replicates = tuple(placement.is_replicate() for placement in tensor.placements)
    return _holders_on(tensor.device_mesh, replicates, dist.get_rank())


@lru_cache(maxsize=64)
def _holders_on(mesh: DeviceMesh, replicates: tuple[bool, ...], rank: int) -> tuple[int, ...]:
    """Cached: a mesh needs most of a millisecond to answer, and all tensors of a model ask it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError.of("model", "holds a tensor of a mesh that this rank is not part of.")
    index = tuple(
        slice(None) if free else at for free, at in zip(replicates, coordinate, strict=True)
    )
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def owners(shards: Mapping[str, Shard], world_size: int, *, spread: bool) -> dict[str, int | None]:
    """Which rank writes each box that this rank holds; None where the box is empty.

    Every rank comes to the same answer without a collective, because it uses only facts that are
    the same everywhere: names, global shapes and holders. With `spread` the bytes are divided
    evenly among the holders, else the lowest holder writes. Buffers are always the lowest
    holder's.
    """
    # One row of loads per number of holders: ranks that hold the same boxes share a row, although
    # their holders differ, so their rows stay equal and so do their answers.
    loads: dict[int, list[int]] = {}
    chosen: dict[str, int | None] = {}
    for name in sorted(shards):
        shard = shards[name]
        holders = shard.holders or tuple(range(world_size))
        load = loads.setdefault(len(holders), [0] * len(holders))
        # Buffers may differ between their holders (statistics of each rank's own batches). Those
        # of one checkpoint come from one rank: a mixture is a state that no rank had.
        lightest = load.index(min(load)) if spread and not shard.is_buffer else 0
        load[lightest] += shard.global_bytes
        chosen[name] = None if shard.is_empty else holders[lightest]
        # A tensor without elements is empty on every rank, and must be written all the same.
        if not math.prod(shard.shape):
            chosen[name] = 0
    return chosen


def owned(
    shards: Mapping[str, Shard], rank: int, world_size: int, *, spread: bool
) -> frozenset[str]:
    """Names of the boxes that this rank writes; see `owners`."""
    chosen = owners(shards, world_size, spread=spread)
    return frozenset(name for name, owner in chosen.items() if owner == rank)


def signature(shards: Mapping[str, Shard]) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, global shapes and dtypes: what must be the same on every rank."""
    return sorted((name, shard.shape, str(shard.local.dtype)) for name, shard in shards.items())
