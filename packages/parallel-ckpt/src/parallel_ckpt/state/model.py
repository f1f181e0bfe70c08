"""The tensors of a model by FQN, whatever wraps it: names, tied weights, the bare module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.state.shards import Shard, shard_of
from parallel_config import clean_fqn


def bare_module(model: nn.Module) -> nn.Module:
    """The user's own model inside DDP and `torch.compile`, in any order of wrapping."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by FQN, tied ones under their first name only.

    FSDP2 units that are gathered at the moment (after an evaluation, say) are resharded first.

    Raises:
        CheckpointError: a module keeps extra state, which could only be pickled.
    """
    model = _resharded(model)
    _refuse_extra_state(model)
    tensors = {clean_fqn(name): parameter for name, parameter in model.named_parameters()}
    return tensors | dict(_persistent_buffers(model))


def aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers, each with the name that is saved."""
    model = bare_module(model)
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    everything: list[tuple[str, torch.Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in everything:
        name = clean_fqn(name)
        if first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def shards_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
    """Box that this rank holds of each tensor, by the same names."""
    return {name: shard_of(tensor, name) for name, tensor in tensors.items()}


def model_shards(model: nn.Module) -> dict[str, Shard]:
    """Box that this rank holds of every parameter and persistent buffer, by FQN."""
    return shards_of(named_tensors(model))


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """FQN of each parameter, tied ones once; FSDP2 units are resharded first."""
    return {p: clean_fqn(name) for name, p in _resharded(model).named_parameters()}


def _resharded(model: nn.Module) -> nn.Module:
    """The bare module with its shards as parameters.

    While a unit is gathered its parameters are other objects, whole and unknown to the optimizer.
    """
    model = bare_module(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield clean_fqn(f"{prefix}.{name}" if prefix else name), buffer


def _refuse_extra_state(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError.of(
                f"model.{clean_fqn(name)}",
                f"({type(module).__name__}) keeps extra state through get_extra_state, which could "
                "only be pickled.",
                "Keep it in buffers.",
            )
