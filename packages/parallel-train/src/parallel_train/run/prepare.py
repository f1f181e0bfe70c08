"""Makes of a task what the loop trains: the engine shards and wraps it, a checkpoint fills it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from parallel_ckpt import restore
from parallel_engine import Ema, Engine, LossFn, resume_average
from parallel_engine.loaders import prepare_loader
from parallel_train.config import TrainConfig
from parallel_train.data.lerobot import Batch
from parallel_train.run.adapt import kept_hyperparameters
from parallel_train.run.task import HeldOut, Task


@dataclass(frozen=True)
class Prepared:
    """What the engine made of a task."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    loader: DataLoader[Batch]
    loss_fn: LossFn[Batch]
    ema: Ema | None = None
    held_out: HeldOut | None = None
    """Its loader moves batches to the device."""

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Within, the model holds the weights to keep: their average, where there is one."""
        return self.ema.averaged() if self.ema is not None else contextlib.nullcontext()


def prepare(engine: Engine, task: Task, config: TrainConfig) -> Prepared:
    """Collective: every rank. Shard and wrap what was built."""
    optimizer: Optimizer | Callable[[nn.Module], Optimizer] = task.build_optimizer
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] = task.build_scheduler
    if not config.meta_init:  # built before the model is cut, as for one process
        optimizer = task.build_optimizer(task.model)
        scheduler = task.build_scheduler(optimizer)
    # With meta_init the engine calls the two builders once the parameters have memory.
    model, prepared_optimizer, prepared_scheduler, loader = engine.prepare(
        task.model, optimizer, scheduler, task.loader, fill=task.fill
    )
    return Prepared(
        model,
        prepared_optimizer,
        # The task always gives one. Accelerate may have wrapped it: it has the same methods then.
        cast(LRScheduler, prepared_scheduler),
        loader,
        task.loss_fn,
        ema=Ema(model, prepared_optimizer, config.ema) if config.ema.decay is not None else None,
        held_out=_on_device(task.held_out, engine),
    )


def fill(
    prepared: Prepared,
    checkpoint: Path,
    changed: frozenset[str],
    *,
    allow_optimizer_change: bool = False,
) -> list[str]:
    """Collective: every rank. Phase 2 of a resume, in place; returns lines for the log.

    `changed` holds the paths of config fields that differ from the checkpoint's.

    Raises:
        ConfigError: the checkpoint does not fit what was built.
    """
    restored = restore(
        checkpoint,
        prepared.model,
        prepared.optimizer,
        prepared.scheduler,
        # What the user changed must not be written over by the checkpoint's value.
        keep=kept_hyperparameters(changed),
        allow_optimizer_change=allow_optimizer_change,
    )
    # The average is part of the optimizer's state: it can be taken up only once that is there.
    line = resume_average(prepared.model, prepared.optimizer, prepared.ema)
    if restored.starts_anew and prepared.ema is not None:
        line = "ema: averages start with the next update, from the weights of the checkpoint"
    return [*restored.notes, *([line] if line else [])]


def _on_device(held_out: HeldOut | None, engine: Engine) -> HeldOut | None:
    if held_out is None:
        return None
    loader = prepare_loader(held_out.loader, engine.accelerator, engine.device)
    return dataclasses.replace(held_out, loader=loader)
