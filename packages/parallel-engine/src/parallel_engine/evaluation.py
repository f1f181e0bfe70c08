"""The loss on data that is not trained on: exact on any number of ranks, and without a trace.

A loss that draws noise of its own draws it by the number of the batch among those of all ranks: the
same on any number of ranks, as long as the batches hold the same samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from parallel_engine.engine import Engine
from parallel_engine.loss import LossFn, forward
from parallel_engine.types import Batch
from parallel_engine.wrapping import reshard


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Loss and metrics over all batches of all ranks; plain numbers, equal on every rank."""

    loss: float
    """Sum of totals over sum of weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means by the batches' weights, over the batches that gave it; by name."""


def evaluate_loss(
    engine: Engine,
    model: nn.Module,
    batches: Iterable[Batch],
    loss_fn: LossFn[Batch],
    *,
    num_counted: int | None = None,
    seed: int = 0,
) -> EvalReport:
    """Collective: every rank, with the same number of batches. Forward only, in evaluation mode.

    A sharded model runs its forward on every rank at once. A rank whose data ends early repeats
    some of it: batches after its first `num_counted` run, and count nothing.

    Torch's random streams start from `seed` and from the batch's number for every batch, that of
    batch `i` on rank `r` of `n` being `i n + r`, so that two evaluations draw the same noise. They
    go on afterwards as if nothing had happened; so do the modes of the modules.

    Buffers that are per rank by nature, such as BatchNorm's statistics, are those of the main rank
    on every rank, as in a checkpoint. Afterwards each rank has its own again.

    Raises:
        ValueError: no batch counts on any rank.
    """
    loss_sum, weight_sum = 0.0, 0.0
    sums: dict[str, tuple[float, float]] = {}
    with (
        _mode_kept(model),
        _streams_of_their_own(engine.device),
        _buffers_of_the_main_rank(engine, model),
    ):
        for index, batch in enumerate(batches):
            number = index * engine.topology.world_size + engine.rank
            torch.manual_seed(((seed << 32) + number) % 2**64)
            with torch.no_grad(), engine.micro_batch(model, 0, 1):
                answer = forward(loss_fn, model, batch)
            weight = float(answer.loss.weight)
            if (num_counted is not None and index >= num_counted) or not weight > 0:
                continue  # nothing counts nothing, also where its mean was not a number
            loss_sum, weight_sum = loss_sum + float(answer.loss.total), weight_sum + weight
            for name, value in answer.metrics.items():
                total, of = sums.get(name, (0.0, 0.0))
                sums[name] = total + float(value) * weight, of + weight
    (loss_sum, weight_sum), means = engine.metric_names.reduce([loss_sum, weight_sum], sums)
    if not weight_sum > 0:
        raise ValueError("nothing was evaluated: the weights of all batches add up to 0")
    return EvalReport(loss=loss_sum / weight_sum, metrics=means)


@contextlib.contextmanager
def _mode_kept(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within; afterwards each module is in the mode that it was in, and sharded.

    FSDP2 keeps the root gathered after a forward, for the backward that does not come.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        reshard(model)
        for module in training:
            module.training = True


@contextlib.contextmanager
def _streams_of_their_own(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextlib.contextmanager
def _buffers_of_the_main_rank(engine: Engine, model: nn.Module) -> Iterator[None]:
    """One set of statistics for the samples of all ranks; afterwards each rank has its own."""
    buffers = _statistics(model, engine.device) if engine.topology.world_size > 1 else []
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        # As bytes: not every backend knows every dtype.
        dist.broadcast(buffer.reshape(-1).view(torch.uint8), src=0)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, former in zip(buffers, own, strict=True):
                buffer.copy_(former)


def _statistics(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Buffers that may differ between ranks: floating-point ones with memory of their own."""
    return [
        buffer.detach()
        for buffer in model.buffers()
        if type(buffer) is torch.Tensor
        and buffer.is_floating_point()
        and buffer.is_contiguous()
        and buffer.numel()
        and buffer.device.type == device.type
    ]
