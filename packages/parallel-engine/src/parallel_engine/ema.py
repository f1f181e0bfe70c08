"""Exponential moving average of the trained weights, kept where the optimizer keeps its state.

An average is one more tensor per parameter, like a momentum: it is sharded, placed, saved, resumed
and brought onto another topology by whatever does so for the optimizer's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel_config import ConfigError, EMAConfig, Problem
from parallel_config.options import option
from parallel_engine.fqns import fqn
from parallel_engine.gradients import local
from parallel_engine.optimizers import inner_optimizer
from parallel_engine.wrapping import reshard

AVERAGE = "ema"
"""Key of a parameter's average in the optimizer's state."""
TRAINED = "trained"
"""Key of its trained weights there while the model holds the average."""
UPDATES = "ema_updates"
"""Key in a parameter group: updates averaged so far."""


class Ema:
    """Averages the weights after every update that the optimizer really makes.

    `average = d * average + (1 - d) * weights` with d = `decay`; with `warmup` d is at most
    (1 + n) / (10 + n) at the n-th update, so that the first, bad weights are soon forgotten. The
    average of a parameter starts as its weights after its first update. Frozen parameters and
    buffers are their own average.

    Args:
        model: as returned by `engine.prepare`.
        optimizer: as returned by `engine.prepare`.
        config: with a decay.

    Raises:
        ConfigError: a trained parameter is narrower than fp32, in which averaging loses updates.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: EMAConfig) -> None:
        if config.decay is None:
            raise ValueError("EMAConfig.decay is None, which means no average")
        self._model, self._decay, self._warmup = model, config.decay, config.warmup
        self._optimizer = inner_optimizer(optimizer)
        _require_wide(model)
        self._handle = self._optimizer.register_step_post_hook(lambda *_: self._update())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model holds the averages, and the optimizer's state the trained weights.

        No collective, nothing is rounded: afterwards both are bit for bit what they were. What is
        saved within holds the averages as its weights, and resumes through `resume_average`.
        """
        _exchange(self._model, self._optimizer, AVERAGE, TRAINED)
        try:
            yield
        finally:
            _exchange(self._model, self._optimizer, TRAINED, AVERAGE)

    def close(self) -> None:
        """Stop averaging."""
        self._handle.remove()

    @torch.no_grad()
    def _update(self) -> None:
        averages: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for group in self._optimizer.param_groups:
            group[UPDATES] = group.get(UPDATES, 0) + 1
            olds, news = averages.setdefault(1 - self._decay_at(group[UPDATES]), ([], []))
            for parameter in group["params"]:
                average = self._optimizer.state.get(parameter, {}).get(AVERAGE)
                if average is not None:
                    olds.append(local(average))
                    news.append(local(parameter.detach()))
                elif parameter.grad is not None:
                    # Not before it has a gradient: an optimizer takes any state that is there for
                    # its own.
                    self._optimizer.state[parameter][AVERAGE] = parameter.detach().clone()
        for weight, (olds, news) in averages.items():
            if olds:
                torch._foreach_lerp_(olds, news, weight)

    def _decay_at(self, update: int) -> float:
        return min(self._decay, (1 + update) / (10 + update)) if self._warmup else self._decay


def resume_average(model: nn.Module, optimizer: Optimizer, ema: Ema | None) -> str | None:
    """After a restore: weights back into the model, averages on or dropped. No collective.

    Returns a line for the log where the checkpoint and this run differ in having an average.
    """
    inner = inner_optimizer(optimizer)
    saved = any(TRAINED in state for state in inner.state.values())
    if saved:
        _exchange(model, inner, TRAINED, AVERAGE)
    if ema is None and saved:
        for state in inner.state.values():
            state.pop(AVERAGE, None)
        for group in inner.param_groups:
            group.pop(UPDATES, None)
        return "ema: the checkpoint's averages are dropped; training goes on from its weights"
    if ema is not None and not saved:
        return "ema: the checkpoint does not hold averages; they start with the next update"
    return None


@torch.no_grad()
def _exchange(model: nn.Module, optimizer: Optimizer, source: str, target: str) -> None:
    """Parameters take the values kept under `source`; their own are kept under `target`."""
    # What is gathered of a sharded module is a copy of the shards, and would outlive the exchange.
    reshard(model)
    for parameter, state in optimizer.state.items():
        if source in state:
            kept, own = state.pop(source), parameter.detach().clone()
            local(parameter.detach()).copy_(local(kept))
            state[target] = own
    reshard(model)


def _require_wide(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and torch.finfo(parameter.dtype).bits < 32:
            raise ConfigError(
                Problem(
                    "ema.decay",
                    f"is set, but {fqn(model, name)} is kept in {parameter.dtype}, where an "
                    "average loses small updates.",
                    "Keep the weights in fp32 and compute in "
                    f"{option('accelerator.mixed_precision', 'bf16')}, or use "
                    f"{option('ema.decay', 'None')}.",
                )
            )
