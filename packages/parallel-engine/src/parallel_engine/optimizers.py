"""Optimizers and schedulers that are given ready, or as functions that build them in time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeGuard, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from parallel_config import AcceleratorConfig, ConfigError, Problem, Topology
from parallel_engine import preflight
from parallel_engine.types import OptimizerFactory, Scheduler, SchedulerFactory
from parallel_engine.wrapping import forward_methods

log = logging.getLogger("parallel_engine")


def require(name: str, value: object, kind: type[object]) -> None:
    """Raise a ConfigError when `value` is not a `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(
            Problem(name, f"is a {type(value).__name__}, but {kind.__name__} is needed.")
        )


def check_given(
    model: nn.Module,
    optimizer: object,
    scheduler: object,
    config: AcceleratorConfig,
    topology: Topology,
    device: torch.device,
) -> tuple[str, ...]:
    """Check what was given to `Engine.prepare`; returns the model's entry points beside `forward`.

    Raises:
        ConfigError: something does not fit; all problems of the model at once.
    """
    require("model", model, nn.Module)
    built = optimizer if isinstance(optimizer, Optimizer) else None
    if optimizer is None:
        if scheduler is not None:
            raise ConfigError(
                Problem(
                    "scheduler",
                    f"is a {type(scheduler).__name__}, but there is no optimizer: without one the "
                    "model is prepared for evaluation alone.",
                    "Give an optimizer too, or None for both.",
                )
            )
    elif built is None and not callable(optimizer):
        require("optimizer", optimizer, Optimizer)
    # First: the checks of the model look into an optimizer that belongs to it.
    problems = list(order_of_building(built, scheduler))
    if problems:
        raise ConfigError(problems)
    preflight.check(model, built, config, topology, device)
    return forward_methods(model)


def order_of_building(optimizer: Optimizer | None, scheduler: object) -> Iterator[Problem]:
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
            f"is a {type(optimizer).__name__} of parameters on the meta device, which are "
            "replaced when they get memory.",
            "Give a function that builds it: lambda model: AdamW(model.parameters()).",
        )


def _takes_no_metric(scheduler: object) -> None:
    """Raise a ConfigError for a scheduler that is stepped by a metric, not by updates."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            Problem(
                "scheduler",
                "is a ReduceLROnPlateau, which needs a metric at each step. The engine steps "
                "schedulers after every update, without a metric.",
                "Give None, and call scheduler.step(metric) after an evaluation.",
            )
        )


def _is_factory(scheduler: object) -> TypeGuard[SchedulerFactory]:
    return callable(scheduler) and not hasattr(scheduler, "step")


def build(
    model: nn.Module,
    optimizer: Optimizer | OptimizerFactory,
    scheduler: Scheduler | SchedulerFactory | None,
) -> tuple[Optimizer, Scheduler | None]:
    """Call what was given as functions.

    Raises:
        ConfigError: what was built is not an optimizer of this model's parameters, or the
            scheduler needs a metric.
    """
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(model)
        require("optimizer", optimizer, Optimizer)
        problems = list(preflight.optimizer_problems(model, optimizer))
        if problems:
            raise ConfigError(problems)
    built = scheduler(optimizer) if _is_factory(scheduler) else cast("Scheduler | None", scheduler)
    _takes_no_metric(built)
    return optimizer, built


def step_mixed_groups_one_by_one(optimizer: Optimizer) -> None:
    """Groups that hold sharded and whole parameters are updated tensor by tensor; says so.

    torch updates all tensors of a group at once, on CUDA also where nobody asks for it, and
    refuses to mix a DTensor with a plain tensor there. A group is not split in two: the schedule
    and checkpoints know the groups as they were given.
    """
    told = []
    for index, group in enumerate(inner_optimizer(optimizer).param_groups):
        kinds = {isinstance(p, DTensor) for p in group["params"] if p.requires_grad}
        given = {name: group[name] for name in ("foreach", "fused") if name in group}
        left_to_torch = bool(given) and all(value is None for value in given.values())
        if len(kinds) < 2 or not (any(given.values()) or left_to_torch):
            continue
        group.update(dict.fromkeys(given, False))
        told.append(str(index))
    if told and (not dist.is_initialized() or dist.get_rank() == 0):
        log.info(
            "optimizer.param_groups[%s] hold sharded and whole parameters (0-dim ones, or those of "
            "fsdp.ignored_modules), so they are updated one by one: foreach and fused are off. "
            "Put the whole ones into a separate group to keep foreach and fused on",
            ", ".join(told),
        )  # fmt: skip


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside accelerate's wrapper, or what was given."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, Optimizer)
    return found
