"""Optimizers and schedulers that are given ready, or as functions that build them in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

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


def _takes_no_metric(scheduler: Any) -> None:
    """Raise a ConfigError for a scheduler that is stepped by a metric, not by updates."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            Problem(
                "scheduler",
                "is a ReduceLROnPlateau, which wants a metric at each step; the engine steps "
                "schedulers after every update, without one.",
                "Give None, and call scheduler.step(metric) after an evaluation.",
            )
        )


def _is_factory(scheduler: Any) -> bool:
    return callable(scheduler) and not hasattr(scheduler, "step")


def build(
    model: nn.Module, optimizer: Optimizer | OptimizerFactory, scheduler: Any
) -> tuple[Optimizer, Any]:
    """Call what was given as functions.

    Raises:
        ConfigError: what was built is no optimizer, or not of this model's parameters; or the
            scheduler wants a metric.
    """
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(model)
        require("optimizer", optimizer, Optimizer)
        problems = list(preflight.optimizer_problems(model, optimizer))
        if problems:
            raise ConfigError(problems)
    if _is_factory(scheduler):
        scheduler = scheduler(optimizer)
    _takes_no_metric(scheduler)
    return optimizer, scheduler


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside accelerate's wrapper, or what was given."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, Optimizer)
    return found
