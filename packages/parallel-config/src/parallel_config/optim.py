"""Optimizer, learning-rate schedule and weight average, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parallel_config.errors import Problem, report


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and the clipping of its gradients."""

    type: Literal["adamw", "adam", "sgd"] = "adamw"
    """Which optimizer."""
    lr: float = 1e-3
    """Peak learning rate; the scheduler multiplies it."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running mean and variance of the gradient (adam, adamw); the first is the
    momentum of sgd."""
    eps: float = 1e-8
    """Added to the denominator of the update (adam, adamw)."""
    weight_decay: float = 1e-4
    """Weight decay (decoupled for adamw)."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradients; None does not clip."""

    def __post_init__(self) -> None:
        # A list would not equal the tuple that is read back from a file. The dataclass is frozen.
        object.__setattr__(self, "betas", tuple(self.betas))
        report(self._problems())

    def _problems(self) -> Iterator[Problem]:
        if not (math.isfinite(self.lr) and self.lr > 0):
            yield Problem(
                "optimizer.lr",
                f"= {self.lr}, but it must be positive and finite.",
                "Use --optimizer.lr 1e-3.",
            )
        # The bias correction of Adam divides by 1 - beta ** n, which is 0 for a beta of 1.
        if not all(0 <= beta < 1 for beta in self.betas):
            yield Problem(
                "optimizer.betas",
                f"= {list(self.betas)}, but both must be at least 0 and below 1.",
                "Use --optimizer.betas 0.9 0.999.",
            )
        for name in ("eps", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                yield Problem(
                    f"optimizer.{name}",
                    f"= {value}, but it must be finite and at least 0.",
                    f"Use --optimizer.{name} with such a number.",
                )
        if self.clip_norm is not None and not (
            math.isfinite(self.clip_norm) and self.clip_norm > 0
        ):
            yield Problem(
                "optimizer.clip_norm",
                f"= {self.clip_norm}, but it must be positive and finite.",
                "Use --optimizer.clip_norm None to leave gradients unclipped.",
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning rate as a function of the number of optimizer updates alone."""

    type: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0."""
    decay_steps: int | None = None
    """Updates until the decay ends, warm-up included; None is the length of the run."""
    min_lr_ratio: float = 0.0
    """Rate at the end of the decay, as a fraction of the peak."""

    def __post_init__(self) -> None:
        report(self._problems())

    def _problems(self) -> Iterator[Problem]:
        if self.warmup_steps < 0:
            yield Problem(
                "scheduler.warmup_steps",
                f"= {self.warmup_steps}, but it counts updates.",
                "Use --scheduler.warmup_steps 0 or more.",
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            yield Problem(
                "scheduler.decay_steps",
                f"= {self.decay_steps} ends no later than scheduler.warmup_steps = "
                f"{self.warmup_steps}.",
                "Use a larger --scheduler.decay_steps, or None for the length of the run.",
            )
        if not 0 <= self.min_lr_ratio <= 1:
            yield Problem(
                "scheduler.min_lr_ratio",
                f"= {self.min_lr_ratio}, but it must be from 0 to 1.",
                "Use --scheduler.min_lr_ratio between 0 and 1.",
            )

    def factor(self, updates: int, *, total_steps: int) -> float:
        """What the peak rate is multiplied by after `updates` optimizer updates.

        Pure, so that the curve is the same for any world size and accumulation.
        """
        if updates < self.warmup_steps:
            # + 1: an update at rate 0 would change nothing, and the peak comes right after.
            return (updates + 1) / (self.warmup_steps + 1)
        if self.type == "constant":
            return 1.0
        end = self.decay_steps if self.decay_steps is not None else total_steps
        # The length of a run may be below the warm-up; then there is no decay to divide by.
        span = max(1, end - self.warmup_steps)
        progress = min(1.0, (updates - self.warmup_steps) / span)
        shape = 1 - progress if self.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * shape


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """An exponential moving average of the weights, which is what is evaluated and published."""

    decay: float | None = None
    """Share of the old average that an update keeps, such as 0.999; None: without an average."""
    warmup: bool = True
    """Keep at most (1 + n) / (10 + n) at the n-th update, so that the average soon forgets the
    first weights."""

    def __post_init__(self) -> None:
        report(self._problems())

    def _problems(self) -> Iterator[Problem]:
        # 1 would keep the first weights for ever.
        if self.decay is not None and not 0 <= self.decay < 1:
            yield Problem(
                "ema.decay",
                f"= {self.decay}, but it must be at least 0 and below 1.",
                "Use --ema.decay 0.999, or None for no average.",
            )
