"""The tensors of a model by FQN, whatever wraps it: names, tied weights, the bare module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.state.shards import Shard, shard_of
from parallel_config.names import added_child


def bare_module(model: nn.Module) -> nn.Module:
    """The user's own model inside DDP and `torch.compile`, in any order of wrapping."""
    while (child := added_child(type(model))) in ("module", "_orig_mod"):
        inner = model._modules[child]
        assert inner is not None
        model = inner
    return model


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by FQN, tied ones under their first name only.

    FSDP2 units that are gathered at the moment (after an evaluation, say) are resharded first.

    Raises:
        CheckpointError: a module keeps extra state, which could only be pickled, or two tensors
            have one name.
    """
    model = _resharded(model)
    _refuse_extra_state(model)
    return _by_name([*_parameters(model), *_persistent_buffers(model)])


def aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers, each with the name that is saved."""
    model = bare_module(model)
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    everything: list[tuple[str, torch.Tensor]] = []
    for members in ("_parameters", "_buffers"):
        for prefix, module in _modules(model, every=True):
            everything += _members(prefix, getattr(module, members))
    for name, tensor in everything:
        if first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def shards_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
    """Box that this rank holds of each tensor, by the same names."""
    return {
        name: replace(shard_of(tensor, name), is_buffer=not isinstance(tensor, nn.Parameter))
        for name, tensor in tensors.items()
    }


def model_shards(model: nn.Module) -> dict[str, Shard]:
    """Box that this rank holds of every parameter and persistent buffer, by FQN."""
    return shards_of(named_tensors(model))


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """FQN of each parameter, tied ones once; FSDP2 units are resharded first."""
    return {parameter: name for name, parameter in _parameters(_resharded(model))}


def _modules(
    module: nn.Module, prefix: str = "", *, every: bool = False, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Each module by its FQN, in the order of `named_modules`: once, or with `every` of its names.

    What a wrapper adds to a name goes because the wrapper is there, never because of how it is
    spelt: a child of the user's own may be called `module` or `_orig_mod`.
    """
    seen = set() if seen is None else seen
    if id(module) in seen and not every:
        return
    seen.add(id(module))
    yield prefix, module
    added = added_child(type(module))
    for name, child in module._modules.items():
        if child is not None:
            below = prefix if name == added else _joined(prefix, name)
            yield from _modules(child, below, every=every, seen=seen)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """By FQN, tied ones under their first name only."""
    seen: set[int] = set()
    for prefix, module in _modules(model):
        for name, parameter in _members(prefix, module._parameters):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


T = TypeVar("T", bound=torch.Tensor)


def _members(prefix: str, tensors: Mapping[str, T | None]) -> Iterator[tuple[str, T]]:
    return ((_joined(prefix, name), t) for name, t in tensors.items() if t is not None)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _by_name(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name in found:
            raise CheckpointError.of(
                f"model.{name}",
                "is the name of two tensors: a wrapper holds one beside the module that it wraps.",
                "Register the wrapper's own tensor under another name.",
            )
        found[name] = tensor
    return found


def drop_gradients(model: nn.Module) -> list[str]:
    """Forget the gradients of a model whose weights were filled; a line where it had some.

    They belong to other weights, and would join the first update.
    """
    model = _resharded(model)
    held = sum(_drop_unsharded(module) for module in model.modules())
    for parameter in model.parameters():
        if parameter.grad is not None:
            held, parameter.grad = held + 1, None
    if not held:
        return []
    return [
        f"gradients of {held} parameters are dropped: they do not belong to the restored weights."
    ]


def _drop_unsharded(module: nn.Module) -> int:
    """Forget what an FSDP2 unit accumulated without a sync; the number of parameters it was for.

    Such gradients are whole and stand at the gathered parameters, or under HSDP in a sum over the
    sharding group that waits for the replicas. FSDP2 adds them to the next backward with a sync.
    """
    if not isinstance(module, FSDPModule):
        return 0
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = list(state._fsdp_param_groups)
    else:
        groups = [state._fsdp_param_group]  # torch 2.11 knows one group per unit
    held = 0
    for group in groups:
        if group is None:  # a root whose parameters are all in units below it
            continue
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and gathered.grad is not None:
                held, gathered.grad = held + 1, None
            if parameter.unsharded_accumulated_grad is not None:  # torch 2.11 keeps it apart
                held, parameter.unsharded_accumulated_grad = held + 1, None
        if group._partial_reduce_output is not None:
            group._partial_reduce_output = None
            getattr(group, "_partial_reduce_output_layout", {}).clear()
            held += len(group.fsdp_params)
    return held


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
    for prefix, module in _modules(model):
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield _joined(prefix, name), buffer


def _refuse_extra_state(model: nn.Module) -> None:
    for name, module in _modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError.of(
                f"model.{name}",
                f"({type(module).__name__}) keeps extra state through get_extra_state, which could "
                "only be pickled.",
                "Keep it in buffers.",
            )
