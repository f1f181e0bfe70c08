"""What passes through the engine without being looked into, under one name each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import nn
from torch.optim import Optimizer

Batch = TypeVar("Batch")
"""A micro-batch is whatever the loader yields and the loss function takes: a tensor, a dict, a
dataclass. The engine only moves its tensors, so the one thing to say is that both are the same."""


class Scheduler(Protocol):
    """What the engine asks of a schedule: one step after each update that was made."""

    # torch's schedulers take an epoch too, accelerate's takes anything.
    def step(self) -> object:
        """Set the learning rates of the next update."""


OptimizerFactory: TypeAlias = Callable[[nn.Module], Optimizer]
"""Builds the optimizer from the prepared model."""
SchedulerFactory: TypeAlias = Callable[[Optimizer], Scheduler]
"""Builds the schedule of the optimizer that was built."""
Hook: TypeAlias = Callable[..., Any]
"""torch calls a hook with whatever the module was called with."""
