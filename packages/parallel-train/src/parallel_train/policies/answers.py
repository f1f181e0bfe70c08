"""Reads what a policy's `forward` returns: tolerantly where nothing is lost, strictly elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

import torch
from torch import Tensor


def read_answer(answer: object, owner: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (0-dim, attached) and metrics (0-dim, detached) of a `forward(batch)`.

    The answer is `(loss, metrics)`, or the loss alone. Metrics are a mapping of numbers and
    one-element tensors, or None; other values in it, such as predictions, are left out.

    Raises:
        TypeError: it is something else; `owner`, the model's class, is named.
    """
    loss, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"{owner}.forward(batch) returned {_describe(answer)}, but it returns (loss, metrics): "
            "a 0-dim tensor and a dict of numbers."
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(
            f"{owner}.forward(batch) returned {_describe(metrics)} beside the loss, but metrics "
            "are a dict of numbers, or None."
        )
    # A loss of shape [1] is as good as a 0-dim one: nothing is lost by taking it.
    return loss.reshape(()), {
        str(name): number
        for name, value in (metrics or {}).items()
        if (number := _number(value)) is not None
    }


def _number(value: object) -> Tensor | None:
    if isinstance(value, Tensor):
        # Detached, or each metric would keep its graph alive until it is logged.
        return value.detach().float().reshape(()) if value.numel() == 1 else None
    if not isinstance(value, SupportsFloat):  # as text is, also where it spells a number
        return None
    try:
        return torch.tensor(float(value))
    except (TypeError, ValueError):  # such as an array of several numbers
        return None


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_describe(part) for part in value) + ")"
    return f"a {type(value).__name__}"
