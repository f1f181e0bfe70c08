"""One optimizer update: forward and backward over the micro-batches, clip, check, step.

The gradient is that of the sum of all losses over the sum of all weights, over the window and all
data-parallel ranks, so that an update does not depend on how its global batch is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel_config import clean_fqn
from parallel_engine.metrics import MetricNames

Metrics = Mapping[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss as the sum over its entries and the number (or weight) of entries, both 0-dim.

    A mean over masked entries does not add up over micro-batches; total and weight do.
    """

    total: Tensor
    weight: Tensor


LossFn = Callable[[nn.Module, Any], Any]
"""`(model, batch) -> loss` or `(loss, metrics)`; a loss is a 0-dim mean, or a `Loss`."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one update did; plain numbers, equal on every rank."""

    loss: float
    """Sum of totals over sum of weights, over the global batch."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate that the update used."""
    seconds: float
    """Wall time of the update on this rank."""
    skipped: bool = False
    """Whether the update was left out because a value was not finite."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Mean over the micro-batches, of all ranks, that gave it; by name."""


class NonFiniteError(RuntimeError):
    """Loss or gradient norm is NaN or infinite; raised on every rank before the update."""


class UnusedParametersError(RuntimeError):
    """Trainable parameters took no part in the loss, which DDP must be told beforehand."""


@dataclass(frozen=True)
class Window:
    """What the micro-batches of one update added up to on this rank; float64 sums.

    They stay on the device: to read one would make the host wait for every backward.
    """

    total: Tensor
    weight: Tensor
    metrics: dict[str, Tensor]
    counts: dict[str, int]
    """Micro-batches that gave a metric, by its name."""


def run_window(
    engine: Any, model: nn.Module, micro_batches: Sequence[Any], loss_fn: LossFn
) -> Window:
    """Collective: every rank. Forward and backward; gradients are reduced on the last backward."""
    zero = torch.zeros((), dtype=torch.float64, device=engine.device)
    total, weight = zero, zero
    metrics: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()
    for index, batch in enumerate(micro_batches):
        with engine.micro_batch(model, index, len(micro_batches)):
            loss, found = evaluate(loss_fn, model, batch)
            engine.backward(loss.total)
        total = total + loss.total.detach().to(zero)
        weight = weight + loss.weight.detach().to(zero)
        for name, value in found.items():
            metrics[name] = metrics.get(name, zero) + value.detach().to(zero)
        counts.update(found.keys())
    return Window(total, weight, metrics, counts)


def evaluate(loss_fn: LossFn, model: nn.Module, batch: Any) -> tuple[Loss, Metrics]:
    """Call `loss_fn` and read its answer.

    Raises:
        TypeError: it returned something else than a 0-dim tensor or a `Loss`.
    """
    answer = loss_fn(model, batch)
    loss, metrics = answer if isinstance(answer, tuple) else (answer, {})
    if isinstance(loss, Loss):
        return loss, metrics
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(f"loss_fn returned {found}, but a loss is a 0-dim tensor or a Loss")
    if _num_rows(batch) == 0:
        # The mean of nothing is NaN. It counts nothing, but its backward must run on every rank:
        # `where` keeps the graph and passes a zero gradient back.
        nothing = torch.zeros_like(loss)
        loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, nothing)
        return Loss(loss, nothing), {}
    return Loss(loss, torch.ones_like(loss)), metrics


def _num_rows(batch: Any) -> int | None:
    values = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(values, Tensor):
        return len(values) if values.ndim else None
    if not isinstance(batch, (Mapping, list, tuple)):
        return None
    sizes = [len(v) for v in values if isinstance(v, Tensor) and v.ndim]
    return sizes[0] if sizes else None


@dataclass(frozen=True)
class Sums:
    """The window summed over all data-parallel ranks; plain numbers."""

    total: float
    weight: float
    metrics: dict[str, float]
    riders: list[float]


def reduce_window(window: Window, names: MetricNames, riders: Sequence[float] = ()) -> Sums:
    """Collective: every rank. One small all-reduce for loss, weight and every metric.

    `riders` are numbers summed along.
    """
    sums = torch.stack([window.total, window.weight, *window.metrics.values()])
    total, weight, *found = sums.tolist()  # the one wait for the device
    metrics = {n: (s, window.counts[n]) for n, s in zip(window.metrics, found, strict=True)}
    (total, weight, *rest), means = names.reduce([total, weight, *riders], metrics)
    return Sums(total, weight, means, rest)


def require_all_used(model: nn.Module, *, allowed: bool) -> None:
    """Check that DDP reduced every gradient; one it waited for would fail the next forward.

    Raises:
        UnusedParametersError: parameters took no part in the loss, by name, with the flag that
            allows them.
    """
    if allowed or not isinstance(model, DistributedDataParallel):
        return
    named = model.module.named_parameters()
    unused = [clean_fqn(name) for name, p in named if p.requires_grad and p.grad is None]
    if unused:
        shown = ", ".join(unused[:10]) + (" ..." if len(unused) > 10 else "")
        raise UnusedParametersError(
            f"{len(unused)} trainable parameters took no part in the loss: {shown}. Freeze them, "
            "or allow it with --accelerator.ddp.find_unused_parameters."
        )


def average_replicated(model: nn.Module, world_size: int) -> None:
    """Collective: every rank. Average the gradients that FSDP2 does not reduce.

    Parameters of ignored modules, and 0-dim ones, stay whole on every rank of a sharded model;
    without this each rank would train its own copy.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    for parameter in parameters:
        # A rank that did not use the parameter still takes part.
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
    if not norm < float("inf"):
        return norm
    factor = scale
    if max_norm is not None:
        factor *= min(1.0, max_norm / (norm + 1e-6))
    if factor != 1.0:
        torch._foreach_mul_([local(g) for g in gradients], factor)
    return norm


def _global_norm(gradients: Sequence[Tensor]) -> float:
    """2-norm over all gradients, each element of a sharded one counted once."""
    sharded: dict[Any, list[Tensor]] = {}
    whole: list[Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            sharded.setdefault(gradient.device_mesh, []).append(gradient.to_local())
        else:
            whole.append(gradient)
    square = _square_sum(whole)
    for mesh, locals_ in sharded.items():
        part = _square_sum(locals_)
        # The last axis shards; over the axis in front of it (HSDP) the shards are replicas.
        dist.all_reduce(part, group=mesh.get_group(mesh.ndim - 1))
        square = square + part
    return float(square.sqrt())


def _square_sum(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm([t.detach() for t in tensors]))
    return norms.double().square().sum().cpu()


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
