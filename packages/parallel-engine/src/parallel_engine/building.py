"""Optimizers and schedulers that are given ready, or as functions that build them in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from parallel_config import ConfigError, Problem
from parallel_engine import preflight

OptimizerFactory = Callable[[nn.Module], Optimizer]


def require(name: str, value: object, kind: type[Any]) -> None:
    """Raise a ConfigError when `value` is no `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(
            Problem(name, f"is a {type(value).__name__}; one {kind.__name__} is needed.")
        )


def order_of_building(optimizer: Optimizer | None, scheduler: Any) -> Iterator[Problem]:
    """Whether optimizer and scheduler are given in a form that can be built in time."""
    if optimizer is None:
        if scheduler is not None and not _is_factory(scheduler):
            yield Problem(
                "scheduler",
                f"is a {type(scheduler).__name__} of another optimizer than the one that is built "
                "later.",
                "Give a function that builds it: lambda optimizer: LambdaLR(optimizer, ...).",
            )
    elif any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
        yield Problem(
            "optimizer",
            f"is a {type(optimizer).__name__} of parameters on the meta device, which become "
            "others when they get memory.",
            "Give a function that builds it: lambda model: AdamW(model.parameters()).",
        )


def _is_factory(scheduler: Any) -> bool:
    return callable(scheduler) and not hasattr(scheduler, "step")


def build(
    model: nn.Module, optimizer: Optimizer | OptimizerFactory, scheduler: Any
) -> tuple[Optimizer, Any]:
    """Call what was given as functions.

    Raises:
        ConfigError: what was built is no optimizer, or not of this model's parameters.
    """
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(model)
        require("optimizer", optimizer, Optimizer)
        problems = list(preflight.optimizer_problems(model, optimizer))
        if problems:
            raise ConfigError(problems)
    return optimizer, scheduler(optimizer) if _is_factory(scheduler) else scheduler


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside accelerate's wrapper, or what was given."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, Optimizer)
    return found
