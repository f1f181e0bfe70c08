"""The loss on data that is not trained on: exact on any number of ranks, and without a trace.

A loss that draws noise of its own differs between numbers of ranks by that noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_engine.step import LossFn, evaluate
from parallel_engine.wrapping import reshard


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Loss and metrics over all batches of all ranks; plain numbers, equal on every rank."""

    loss: float
    """Sum of totals over sum of weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means by the batches' weights, by name."""


def evaluate_loss(
    engine: Any,
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    *,
    num_counted: int | None = None,
    seed: int = 0,
) -> EvalReport:
    """Collective: every rank, with the same number of batches. Forward only, in evaluation mode.

    A sharded model runs its forward on every rank at once. A rank whose data ends early repeats
    some of it: batches after its first `num_counted` run, and count nothing.

    Torch's random streams start from `seed` within, so that two evaluations draw the same noise,
    and go on afterwards as if nothing had happened; so do the modes of the modules.

    Raises:
        ValueError: no batch counts on any rank.
    """
    sums: dict[str, Tensor] = {}
    with _mode_kept(model), _streams_of_their_own(engine.device, seed + engine.rank):
        for index, batch in enumerate(batches):
            with torch.no_grad(), engine.micro_batch(model, 0, 1):
                loss, metrics = evaluate(loss_fn, model, batch)
            counts = 1.0 if num_counted is None or index < num_counted else 0.0
            weight = _number(loss.weight) * counts
            # Nothing counts nothing, also where its mean was not a number.
            total = _number(loss.total) if weight > 0 else torch.zeros_like(weight)
            _add(sums, "", total)
            _add(sums, " weight", weight)
            for name, value in metrics.items():
                _add(sums, name, _number(value) * weight if weight > 0 else weight)
    names = sorted(sums)
    vector = torch.stack([sums[name] for name in names])
    if dist.is_initialized():
        dist.all_reduce(vector)
    found = dict(zip(names, vector.tolist(), strict=True))
    weight_of_all = found.pop(" weight")
    if not weight_of_all > 0:
        raise ValueError("nothing was evaluated: the weights of all batches add up to 0")
    means = {name: value / weight_of_all for name, value in found.items()}
    return EvalReport(loss=means.pop(""), metrics=means)


def _number(value: Tensor) -> Tensor:
    return value.detach().double().cpu()


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


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
def _streams_of_their_own(device: torch.device, seed: int) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
