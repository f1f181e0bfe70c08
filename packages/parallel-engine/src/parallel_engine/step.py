"""One optimizer update: forward and backward over the micro-batches, clip, check, step.

The gradient is that of the sum of all losses over the sum of all weights, over the window and all
data-parallel ranks, so that an update does not depend on how its global batch is split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel_config import clean_fqn
from parallel_engine.loaders import to_device
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
"""`(model, batch) -> loss` or `(loss, metrics)`; a loss is a 0-dim mean, or a `Loss`.

Metrics are numbers by name. The batch is on the engine's device.
"""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one update did; plain numbers, equal on every rank but `seconds`."""

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
            loss, found = evaluate(loss_fn, model, to_device(batch, engine.device))
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
        TypeError: it returned something else than a 0-dim tensor or a `Loss`, or a metric that is
            not one number.
    """
    answer = loss_fn(model, batch)
    loss, given = answer if isinstance(answer, tuple) else (answer, {})
    metrics = {name: _metric(name, value) for name, value in given.items()}
    if isinstance(loss, Loss):
        return loss, metrics
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(f"loss_fn returned {found}, but a loss is a 0-dim tensor or a Loss")
    if _is_empty(batch):
        # The mean of nothing is NaN. It counts nothing, but its backward must run on every rank:
        # `where` keeps the graph and passes a zero gradient back.
        nothing = torch.zeros_like(loss)
        loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, nothing)
        return Loss(loss, nothing), {}
    return Loss(loss, torch.ones_like(loss)), metrics


def _metric(name: str, value: Any) -> Tensor:
    try:
        number = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        number = torch.empty(0)
    if number.numel() != 1:
        found = list(value.shape) if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"loss_fn returned the metric {name!r} = {found}, but one is a number")
    return number.reshape(())


def _is_empty(batch: Any) -> bool:
    """Whether no tensor of the batch has a row. One without rows may be an empty list of boxes."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    tensors = [values] if isinstance(values, Tensor) else values
    if not isinstance(tensors, Iterable):
        return False
    lengths = [len(t) for t in tensors if isinstance(t, Tensor) and t.ndim]
    return bool(lengths) and not any(lengths)


@dataclass(frozen=True)
class Sums:
    """The window summed over all data-parallel ranks; plain numbers."""

    total: float
    weight: float
    metrics: dict[str, float]


def reduce_window(window: Window, names: MetricNames) -> Sums:
    """Collective: every rank. One small all-reduce for loss, weight and every metric."""
    sums = torch.stack([window.total, window.weight, *window.metrics.values()])
    total, weight, *found = sums.tolist()  # the one wait for the device
    metrics = {n: (s, window.counts[n]) for n, s in zip(window.metrics, found, strict=True)}
    (total, weight), means = names.reduce([total, weight], metrics)
    return Sums(total, weight, means)


def require_all_used(model: nn.Module, *, allowed: bool) -> None:
    """Check that DDP reduced every gradient of the last backward.

    One that it still waits for keeps its bucket unreduced, would fail the next forward, and may be
    there all the same: from an earlier micro-batch.

    Raises:
        UnusedParametersError: parameters took no part in the loss, by name, with the flag that
            allows them.
    """
    if allowed or not isinstance(model, DistributedDataParallel):
        return
    named = model.module.named_parameters()
    unused = [clean_fqn(name) for name, p in named if p.requires_grad and p.grad is None]
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        unused = _waited_for(model, str(error))
    if unused:
        shown = ", ".join(unused[:10]) + (" ..." if len(unused) > 10 else "")
        raise UnusedParametersError(
            f"{len(unused)} trainable parameters took no part in the loss of the last micro-batch: "
            f"{shown}. Freeze them, or allow it with --accelerator.ddp.find_unused_parameters."
        )


def _waited_for(model: DistributedDataParallel, message: str) -> list[str]:
    """Names of the parameters whose numbers torch's message lists, among the trainable ones."""
    named = [clean_fqn(name) for name, p in model.module.named_parameters() if p.requires_grad]
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
    return (
        [named[int(i)] for i in numbers[1].split()] if numbers else ["(torch does not say which)"]
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
