"""Gradients between backward and the optimizer: found, averaged, scaled, clipped, dropped."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel_config import clean_fqn
from parallel_engine.errors import UnusedParametersError
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


def require_all_used(model: nn.Module, *, allowed: bool) -> None:
    """Check that DDP reduced every gradient of the last backward.

    DDP does not reduce a bucket in which it still waits for a gradient, and its next forward would
    fail. The gradient may be there all the same, from an earlier micro-batch.

    Raises:
        UnusedParametersError: parameters took no part in the loss; gives their names, and the flag
            that allows them.
    """
    if allowed or not isinstance(model, DistributedDataParallel):
        return
    named = model.module.named_parameters()
    unused = [clean_fqn(name) for name, p in named if p.requires_grad and p.grad is None]
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        unused = _names_in(str(error), model)
    if unused:
        shown = ", ".join(unused[:_MAX_LISTED]) + (" ..." if len(unused) > _MAX_LISTED else "")
        raise UnusedParametersError(
            f"{len(unused)} trainable parameters took no part in the loss of the last micro-batch: "
            f"{shown}. Freeze them, or allow it with --accelerator.ddp.find_unused_parameters "
            "(DDPConfig.find_unused_parameters)."
        )


def _names_in(message: str, model: DistributedDataParallel) -> list[str]:
    """Names of the parameters in torch's message, which counts the trainable ones alone."""
    named = [clean_fqn(name) for name, p in model.module.named_parameters() if p.requires_grad]
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


def scale_and_clip(
    parameters: Sequence[nn.Parameter], *, scale: float, max_norm: float | None
) -> float:
    """Collective: every rank. Scale gradients, then clip them by their true global norm.

    Returns the norm after scaling and before clipping, the same on every rank; not finite when any
    gradient on any rank is not. Nothing is changed in that case.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = _global_norm(gradients) * scale
    if not norm < float("inf"):  # NaN included, which compares as false
        return norm
    factor = scale
    if max_norm is not None:
        factor *= min(
            1.0, max_norm / (norm + 1e-6)
        )  # as torch's clip_grad_norm_, for equal numbers
    # One pass for both. It is left out where it changes nothing: it reads and writes every byte.
    if factor != 1.0:
        torch._foreach_mul_([local(g) for g in gradients], factor)
    return norm


def _global_norm(gradients: Sequence[Tensor]) -> float:
    """2-norm over all gradients. Each element of a sharded gradient counts once."""
    sharded: dict[DeviceMesh, list[Tensor]] = {}
    whole: list[Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            sharded.setdefault(gradient.device_mesh, []).append(gradient.to_local())
        else:
            whole.append(gradient)
    square = _square_sum(whole)  # the same on every rank already, so it is not summed
    for mesh, locals_ in sharded.items():
        part = _square_sum(locals_)
        # The last axis shards; over the axis in front of it (HSDP) the shards are replicas.
        dist.all_reduce(part, group=mesh.get_group(mesh.ndim - 1))
        square = square + part
    return float(square.sqrt())


def _square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """On the CPU: a group has a CPU backend on every kind, also where shards are offloaded."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm([t.detach() for t in tensors]))
    return norms.double().square().sum().cpu()


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
