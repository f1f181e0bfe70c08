"""Gradients between backward and the optimizer: found, averaged, scaled, clipped, dropped."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel_engine.errors import UnusedParametersError
from parallel_engine.fqns import fqn
from parallel_engine.options import option
from parallel_engine.wrapping import param_groups, reshard

_MAX_LISTED = 10


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Gradients of backward passes in here stay on this rank; the next pass outside reduces all.

    accelerate's `no_sync` is not used: its state forgets on CPU that the model is sharded, see
    cpu_fsdp.py.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def unused_parameters(model: nn.Module, *, allowed: bool) -> UnusedParametersError | None:
    """The error of parameters whose gradients DDP did not reduce in the last backward, if any.

    DDP does not reduce a bucket in which it still waits for a gradient, and its next forward would
    fail. The gradient may be there all the same, from an earlier micro-batch. The error gives
    their names, and the flag that allows them.
    """
    if allowed or not isinstance(model, DistributedDataParallel):
        return None
    named = model.module.named_parameters()
    unused = [fqn(model.module, name) for name, p in named if p.requires_grad and p.grad is None]
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        unused = _names_in(str(error), model)
    if not unused:
        return None
    shown = ", ".join(unused[:_MAX_LISTED]) + (" ..." if len(unused) > _MAX_LISTED else "")
    return UnusedParametersError(
        f"{len(unused)} trainable parameters did not take part in the loss of the last "
        f"micro-batch: {shown}. Freeze them, or allow it with "
        f"{option('ddp.find_unused_parameters')}."
    )


def _names_in(message: str, model: DistributedDataParallel) -> list[str]:
    """Names of the parameters in torch's message, which counts the trainable ones alone."""
    named = [
        fqn(model.module, name) for name, p in model.module.named_parameters() if p.requires_grad
    ]
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
    return [named[int(i)] for i in numbers[1].split()] if numbers else ["(torch does not name it)"]


def average_replicated(model: nn.Module, world_size: int) -> None:
    """Collective: every rank. Average the gradients that FSDP2 does not reduce.

    Parameters of ignored modules, and 0-dim ones, stay whole on every rank of a sharded model.
    Without this each rank would train its own copy.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    for parameter in parameters:
        # A rank that did not use the parameter takes part too: the others wait for it.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def square_share(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """Share of this rank in the squared 2-norm of all gradients; the shares add up to it.

    0-dim, float64, on `device`. Each element counts once: a shard on the first of its replicas,
    and what is whole on every rank on rank 0.
    """
    sharded: dict[DeviceMesh, list[Tensor]] = {}
    whole: list[Tensor] = []
    for gradient in (p.grad for p in parameters if p.grad is not None):
        if isinstance(gradient, DTensor):
            sharded.setdefault(gradient.device_mesh, []).append(gradient.to_local())
        else:
            whole.append(gradient)
    # The last axis shards; over the axis in front of it (HSDP) the shards are replicas.
    mine = [g for mesh, locals_ in sharded.items() if _is_first_replica(mesh) for g in locals_]
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return _square_sum([*mine, *(whole if is_first else ())], device)


def global_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Collective where sharded. 2-norm of all gradients, the same on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = gradients[0].device if gradients else torch.device("cpu")
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        square = square_share(parameters, device)
        dist.all_reduce(square)
    else:  # whole gradients are the same on every rank already
        square = _square_sum(gradients, device)
    return math.sqrt(square.item())


def scale_and_clip(
    parameters: Sequence[nn.Parameter], *, norm: float, scale: float, max_norm: float | None
) -> None:
    """Scale gradients, then clip them to `max_norm`, where `norm` is theirs after scaling.

    Nothing is changed where `norm` is not finite.
    """
    if not norm < float("inf"):  # NaN included, which compares as false
        return
    factor = scale
    if max_norm is not None:
        factor *= min(
            1.0, max_norm / (norm + 1e-6)
        )  # as torch's clip_grad_norm_, for equal numbers
    # One pass for both. It is left out where it changes nothing: it reads and writes every byte.
    if factor != 1.0:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def _is_first_replica(mesh: DeviceMesh) -> bool:
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def _square_sum(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    if not tensors:  # made where it is needed: to send it there would make the host wait
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm([t.detach() for t in tensors]))
    return norms.double().square().sum().to(device)


def drop_gradients(model: nn.Module) -> None:
    """Gradients to None, also the whole ones that a sharded model keeps between micro-batches."""
    for module in model.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            for parameter in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(parameter):  # torch 2.11
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
    # Only a resharded module shows its shards as parameters, whose gradients are dropped here.
    reshard(model)
    model.zero_grad(set_to_none=True)


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
