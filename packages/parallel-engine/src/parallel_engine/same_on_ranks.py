"""Every rank begins with the same config and model: the same tensors, with the main rank's values.

FSDP2 cuts the model that each rank has built. If ranks drew different random numbers, the shards
would be parts of different models, and under HSDP the replicas would never become equal. DDP sends
rank 0's parameters, but buffers only when it keeps sending them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from itertools import zip_longest
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_config import AcceleratorConfig, ConfigError, Problem, Topology, agreed
from parallel_engine.fqns import fqn

log = logging.getLogger("parallel_engine")


def require_same_config(
    config: AcceleratorConfig, topology: Topology, device: torch.device
) -> None:
    """Collective: every rank. Ranks with different settings would wait for one another forever.

    Raises:
        ConfigError: on every rank, with the first field that differs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = [*_fields("accelerator", config), *_fields("topology", topology)]
    _require_same(
        [*mine, f"device = {device.type}"], "config", "Start every rank with the same config."
    )


def begin_alike(model: nn.Module, device: torch.device) -> None:
    """Collective: every rank. Give parameters and buffers the values of rank 0, in place.

    Tensors are sent one by one through `device`. Those on meta do not have values and are left out.

    Raises:
        ConfigError: on every rank, when ranks built models with other tensors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _require_same(list(_described(model)), "model", "Build it from the same config on every rank.")
    tensors = dict(_tensors(model))
    changed = [name for name, tensor in tensors.items() if not _take_mains(tensor, device)]
    _tell(changed, len(tensors))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _described(model: nn.Module) -> Iterator[str]:
    for name, tensor in _tensors(model):
        trains = "" if isinstance(tensor, nn.Parameter) and tensor.requires_grad else ", fixed"
        dtype = str(tensor.dtype).removeprefix("torch.")
        on_meta = ", on meta" if tensor.is_meta else ""
        yield f"{fqn(model, name)} {list(tensor.shape)} {dtype}{trains}{on_meta}"


def _fields(path: str, value: object) -> Iterator[str]:
    """A line for each field of nested dataclasses."""
    if not dataclasses.is_dataclass(value):
        yield f"{path} = {value!r}"
        return
    for field in dataclasses.fields(value):
        yield from _fields(f"{path}.{field.name}", getattr(value, field.name))


def _require_same(mine: list[str], what: str, remedy: str) -> None:
    """Compare a short hash first: the list of a large model, from many ranks, is long."""
    value = crc32("\n".join(mine).encode())
    hashes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(hashes, value)
    if len(set(hashes)) == 1:
        return
    lists: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(lists, mine)
    rank = next(r for r, other in enumerate(lists) if other != lists[0])
    pairs = zip_longest(lists[0], lists[rank], fillvalue="nothing")
    first, other = next((a, b) for a, b in pairs if a != b)
    found = f"differs between ranks: where rank 0 has {first}, rank {rank} has {other}."
    raise agreed(ConfigError(Problem(what, found, remedy)))


@torch.no_grad()
def _take_mains(tensor: Tensor, device: torch.device) -> bool:
    """Collective: every rank. Whether the value was rank 0's before."""
    if tensor.is_meta or not tensor.numel():
        return True
    sent = tensor.detach().to(device, copy=True).contiguous()
    dist.broadcast(sent.view(-1).view(torch.uint8), src=0)  # bytes: every backend sends them
    sent = sent.to(tensor.device)
    if torch.equal(sent.view(-1).view(torch.uint8), _bytes(tensor)):
        return True
    tensor.data.copy_(sent)
    return False


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _tell(changed: list[str], count: int) -> None:
    lists: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(lists, changed)
    names = list(dict.fromkeys(name for found in lists for name in found))
    if names and dist.get_rank() == 0:
        shown = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        log.info(
            "ranks began with different values in %d of %d tensors (%s); rank 0's are used",
            len(names), count, shown,
        )  # fmt: skip
