"""An optimizer whose state is not taken from a checkpoint: it becomes as if it were just built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallel_ckpt.errors import StateMismatch
from parallel_ckpt.state.model import parameter_names
from parallel_ckpt.state.optimizer import class_of, foreign, number_of, put, ratio


def require_anew(model: nn.Module, optimizer: Optimizer) -> None:
    """Ask, before anything is changed, whether `start_anew` can do its work. No collective.

    Raises:
        StateMismatch: a parameter of the optimizer is not the model's, or no other optimizer can be
            built from its groups.
    """
    names = parameter_names(model)
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise StateMismatch(foreign(parameter, f"param_groups[{i}]").problems)
    _fresh_state(optimizer)


def _fresh_state(optimizer: Optimizer) -> dict[torch.Tensor, Any]:
    """What the constructor puts into `state`: Adagrad does not work with an empty one."""
    # One without state has not stepped yet, and its constructor puts nothing there.
    if not optimizer.state:
        return {}
    kind: Any = type(optimizer)
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    try:
        known = inspect.signature(kind).parameters
        given = {key: value for key, value in optimizer.defaults.items() if key in known}
        return dict(kind(groups, **given).state)
    except Exception as error:  # of a class of the user's, whose constructor may want anything
        raise StateMismatch.of(
            "optimizer",
            f"has state, but a new {class_of(optimizer)} cannot be built from its groups "
            f"({type(error).__name__}: {error}), so its state cannot start anew.",
            "Give an optimizer whose state is empty.",
        ) from error


def start_anew(index: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Of the index only the place on the schedule's curve is taken. No collective."""
    names = parameter_names(model)
    hyper_of = {fqn: group["hyper"] for group in index["groups"] for fqn in group["params"]}
    for group in optimizer.param_groups:
        known = (hyper_of.get(names[parameter]) for parameter in group["params"])
        saved = next((hyper for hyper in known if hyper is not None), None)
        wanted = number_of(group.get("initial_lr", group.get("lr")))
        if saved is not None and "lr" in saved and wanted is not None:
            base, lr = number_of(saved.get("initial_lr", saved["lr"])), number_of(saved["lr"])
            put(group, "lr", ratio(lr, base) * wanted)
    # Built only now: a constructor may look at the weights, which have just been restored.
    fresh = _fresh_state(optimizer)
    optimizer.state.clear()
    optimizer.state.update(fresh)
