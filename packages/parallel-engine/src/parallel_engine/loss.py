"""What a loss function returns, and how the engine reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from parallel_engine.types import Batch


@dataclass(frozen=True)
class Loss:
    """A loss as the sum over its entries and the number (or weight) of entries, both 0-dim.

    A mean over masked entries does not add up over micro-batches; total and weight do. A loss that
    is given as a plain mean counts every micro-batch alike, also where they hold different numbers
    of rows, as the last batch of an epoch may.
    """

    total: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Answer:
    """What a loss function found. One that returns an `Answer` has checked it: it is taken as is.

    Metrics are 0-dim tensors without a graph.
    """

    loss: Loss
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


Given: TypeAlias = "Tensor | Loss | Answer | tuple[Tensor | Loss, Mapping[str, Tensor | float]]"
"""A 0-dim mean or a `Loss`, alone or with metrics by name; or an `Answer`."""
LossFn: TypeAlias = Callable[[nn.Module, Batch], Given]
"""`(model, batch)`, with the batch on the engine's device."""


def forward(loss_fn: LossFn[Batch], model: nn.Module, batch: Batch) -> Answer:
    """Call `loss_fn` and read what it returns.

    Raises:
        TypeError: it returned something else than a 0-dim tensor or a `Loss`, or a metric that is
            not one number.
    """
    given = loss_fn(model, batch)
    if isinstance(given, Answer):
        return given
    loss, named = given if isinstance(given, tuple) else (given, {})
    metrics = {name: _metric(name, value) for name, value in named.items()}
    if isinstance(loss, Loss):
        return Answer(loss, metrics)
    _require_one_number(loss)
    if _is_empty(batch):
        # The mean over no rows is NaN. It must not count, but its backward must run on every rank:
        # `where` keeps the graph and passes a gradient of zero back.
        zero = torch.zeros_like(loss)
        loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, zero)
        return Answer(Loss(loss, zero))
    return Answer(Loss(loss, torch.ones_like(loss)), metrics)


def _require_one_number(loss: object) -> None:
    if isinstance(loss, Tensor) and not loss.ndim:
        return
    found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise TypeError(f"loss_fn returned {found}, but a loss is a 0-dim tensor or a Loss")


def _metric(name: str, value: object) -> Tensor:
    try:
        number = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        number = torch.empty(0)  # refused below, with the value as it was given
    if number.numel() != 1:
        found = list(value.shape) if isinstance(value, Tensor) else repr(value)
        raise TypeError(
            f"loss_fn returned the metric {name!r} = {found}, but a metric is one number"
        )
    return number.reshape(())


def _is_empty(batch: object) -> bool:
    """Whether every tensor of the batch has no rows.

    One tensor without rows is not enough: a batch with pictures may have an empty list of boxes.
    """
    values = batch.values() if isinstance(batch, Mapping) else batch
    tensors = [values] if isinstance(values, Tensor) else values
    if not isinstance(tensors, Iterable):
        return False
    lengths = [len(t) for t in tensors if isinstance(t, Tensor) and t.ndim]
    return bool(lengths) and not any(lengths)
