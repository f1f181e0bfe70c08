"""From the meta device to real memory: a model is sharded first and gets its values afterwards.

No rank ever holds the whole model. Memory is allocated for this rank's shards alone, and every byte
of it is marked. A `fill` then writes values in place: `parallel_ckpt.load_weights` streams them
from a checkpoint, `initialize` draws them module by module. A tensor that still carries the mark is
named in an error instead of being trained on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy

from parallel_config import (
    AcceleratorConfig,
    ConfigError,
    Problem,
    Topology,
    agreed,
)
from parallel_engine.agreement import from_main, together
from parallel_engine.fqns import fqn

Fill = Callable[[nn.Module], Any]
"""Collective: every rank. Writes values into a model's parameters and buffers, in place."""

_MAX_LISTED = 10
# Bytes that no value has: of floating point it is a NaN that no arithmetic makes; of other dtypes
# a pattern, looked for in whole tensors only.
_NAN_MARK, _MARK = 0xFF, 0xA5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build a model in here: its parameters take no memory, its buffers are computed as ever.

    Better than `torch.device("meta")`, under which buffers lose their values: those with
    `persistent=False` are in no checkpoint. Tied parameters stay tied. No random numbers are drawn
    by modules that fill parameters after registering them, as those of `torch.nn` do.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not is_lazy(param):
            _replace(param, param.detach().to("meta"))

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_on_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer is still without memory."""
    return any(tensor.is_meta for _, tensor in _named_tensors(model))


def plain_meta_tensors(model: nn.Module) -> Iterator[Problem]:
    """Tensors on meta that are neither parameter nor buffer: nothing could ever fill them."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                yield Problem(
                    f"model.{prefix}.{name}" if prefix else f"model.{name}",
                    "is a plain tensor on the meta device, so its values are lost.",
                    "Make it a buffer, or build the model under "
                    "parallel_engine.parameters_on_meta() instead of torch.device('meta').",
                )


def shard_alone(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Let accelerate shard a model without the optimizer that it insists on.

    It finds an optimizer's parameters by their addresses, which on meta are all 0: a real one would
    silently lose all but one of them. So it gets a stand-in, and forgets it.
    """
    stand_in = torch.optim.SGD([next(model.parameters())])
    wrapped, _ = accelerator.prepare(model, stand_in)
    accelerator._optimizers.clear()
    return wrapped  # type: ignore[no-any-return]


def allocate(model: nn.Module, device: torch.device, *, shards: torch.device | None = None) -> None:
    """Give every tensor on meta memory on `device`, shards on `shards`, marked as without a value.

    Other tensors stay as they are, and so do ties. A module with a method `reset_buffers()` is
    asked to compute its buffers; they may be replaced or written.
    """
    lost = [
        m for m in model.modules() if any(b is not None and b.is_meta for b in m._buffers.values())
    ]
    for _, tensor in _named_tensors(model):
        if tensor.is_meta:
            _replace(tensor, _empty(tensor, device, shards or device))
            _bytes_of(tensor).fill_(_mark_of(tensor))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Changes nothing: FSDP2 takes note of the shards' new memory.
            module._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]
    for module in lost:
        reset = getattr(module, "reset_buffers", None)
        if callable(reset):
            with torch.no_grad():
                reset()


def materialize(
    model: nn.Module,
    on_meta: bool,
    fill: Fill | None,
    config: AcceleratorConfig,
    topology: Topology,
    device: torch.device,
) -> None:
    """Collective: every rank. Memory for what has none, then values.

    `fill` may have collectives of its own, so it stands under no agreement.
    """
    shards = torch.device("cpu") if config.fsdp.cpu_offload else device
    if on_meta:
        together(lambda: _allocate_here(model, device, shards))
    if fill is None:
        return
    with torch.no_grad():
        fill(model)
    if on_meta:
        require_filled(model)
    if topology.is_sharded:
        replicas_alike(model)


def _allocate_here(model: nn.Module, device: torch.device, shards: torch.device) -> None:
    allocate(model, device, shards=shards)
    move_whole(model, device, ())


def require_filled(model: nn.Module) -> None:
    """Collective: every rank. Check that nothing on any rank carries the mark of `allocate`.

    Raises:
        ConfigError: parameters and buffers are without values; gives their names, the same on
            every rank.
    """
    found = _on_any_rank({name for name, t in _named_tensors(model) if _is_marked(t)})
    derived = _non_persistent(model)
    empty = {name: name in derived for name, _ in _named_tensors(model) if name in found}
    problems = []
    stored = [name for name, is_derived in empty.items() if not is_derived]
    if stored:
        problems.append(
            Problem(
                "model",
                f"was built on the meta device, and nothing gave values to {_listed(stored)}.",
                "Give engine.prepare a fill that writes them: parallel_ckpt.load_weights from a "
                "checkpoint, or parallel_engine.initialize.",
            )
        )
    computed = [name for name, is_derived in empty.items() if is_derived]
    if computed:
        problems.append(
            Problem(
                "model",
                f"was built on the meta device, which lost its buffers {_listed(computed)}; with "
                "persistent=False checkpoints do not hold them.",
                "Build the model under parallel_engine.parameters_on_meta(), or give their "
                "module a method reset_buffers() that computes them.",
            )
        )
    if problems:
        raise agreed(ConfigError(problems))


def move_whole(model: nn.Module, device: torch.device, ignored: Sequence[nn.Module]) -> None:
    """Parameters that are not sharded are moved here; FSDP2 moves the others."""
    for module in ignored:
        if is_on_meta(module):
            allocate(module, device)
        module.to(device)
    for buffer in model.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(device)


def initialize(model: nn.Module, reset: Callable[[nn.Module], Any] | None = None) -> None:
    """Collective: every rank. Draw a model's initial values, one module at a time, in place.

    Each module with parameters or buffers of its own gets its whole parameters in host memory for
    as long as `reset(module)` runs, by default `module.reset_parameters()`; this rank keeps its
    part. `reset` writes the module's own parameters, not those of its children, which come before
    it, as when the model is built. Modules without that method are left alone. Random numbers come
    from the main rank's generator, so that the values are the same on any number of ranks and any
    kind; no rank's own generator moves. A tied parameter keeps the values of its first module.
    """
    state = from_main(torch.get_rng_state)
    done: set[int] = set()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_rng_state(state)
        for module in dict.fromkeys(_bottom_up(model)):
            if module._parameters or module._buffers:
                with _whole_parameters(module, done):
                    (reset or _reset)(module)


def _bottom_up(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _bottom_up(child)
    yield module


def _reset(module: nn.Module) -> None:
    """`nn.MultiheadAttention` has its method under the second name."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


@torch.no_grad()
def replicas_alike(model: nn.Module) -> None:
    """Collective: every rank. What several ranks of a sharded model hold gets the first's values.

    A fill that draws by itself, or reads what differs between machines, would leave replicas that
    never become equal.
    """
    for _, tensor in _named_tensors(model):
        group = None
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.ndim == 1:
                continue  # every rank holds another part
            group = tensor.device_mesh.get_group(0)  # the axis that replicates comes first
        local = _local(tensor)
        if local.numel():
            sent = local.contiguous()
            dist.broadcast(_bytes_of(sent), group=group, group_src=0)
            local.copy_(sent)


@contextlib.contextmanager
def _whole_parameters(module: nn.Module, done: set[int]) -> Iterator[None]:
    """Inside, a module's own parameters are whole and on the host; their values are kept.

    A parameter that was not written keeps the values that it had before.
    """
    own = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in own.items():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        _bytes_of(whole).fill_(_mark_of(whole))
        module._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    try:
        yield
        for name, parameter in own.items():
            drawn = module._parameters[name]
            assert drawn is not None
            if id(parameter) not in done and not _is_marked(drawn):
                done.add(id(parameter))
                _write(parameter, drawn.detach())
    finally:
        module._parameters.update(own)


def _write(parameter: Tensor, whole: Tensor) -> None:
    """Copy the part of `whole` that this rank holds into a parameter. No collective."""
    if isinstance(parameter, DTensor):
        part = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(whole)


def _replace(tensor: Tensor, new: Tensor) -> None:
    """Let `tensor` become `new`, for every reference to it, those of tied modules too."""
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():  # what users hang on their parameters
            vars(new).setdefault(name, value)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


def _empty(tensor: Tensor, device: torch.device, shards: torch.device) -> Tensor:
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=shards)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(fqn(model, name), tensor) for name, tensor in named]


def _non_persistent(model: nn.Module) -> set[str]:
    return {
        fqn(model, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _bytes_of(tensor: Tensor) -> Tensor:
    return _local(tensor).reshape(-1).view(torch.uint8)


def _mark_of(tensor: Tensor) -> int:
    return _NAN_MARK if tensor.is_floating_point() or tensor.is_complex() else _MARK


def _is_marked(tensor: Tensor) -> bool:
    flat = _bytes_of(tensor)
    if not flat.numel():
        return False
    if _mark_of(tensor) == _MARK:
        return bool((flat == _MARK).all())
    numbers = flat.view(_INTEGERS[min(8, tensor.element_size())])
    return bool((numbers == (_NAN_MARK if numbers.dtype == torch.uint8 else -1)).any())


def _on_any_rank(names: set[str]) -> set[str]:
    if not dist.is_initialized():
        return names
    everyones: list[set[str]] = [names] * dist.get_world_size()
    dist.all_gather_object(everyones, names)
    return set().union(*everyones)


def _listed(names: list[str]) -> str:
    more = f" ... ({len(names)} in all)" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
