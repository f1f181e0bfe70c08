"""The story of a run, from a job to its last checkpoint. Read this first.

    decide     where the run starts: afresh, or from a checkpoint (phase 1, before prepare)
    build      data, policy, optimizer, schedule
    prepare    the engine shards and wraps them
    fill       weights, optimizer and schedule from the checkpoint (phase 2, after prepare)
    loop       one report per optimizer update; sinks show it, the saver keeps it
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt import CheckpointSaver, read_start, restore
from parallel_engine import Engine

from parallel_train.config import SCHEMA, TrainConfig
from parallel_train.loop import Loop, Prepared
from parallel_train.run_folder import RunFolder
from parallel_train.signals import PREEMPTED, StopRequest
from parallel_train.sinks import JsonlSink, Sinks, console_sink
from parallel_train.start import Start, decide_start
from parallel_train.task import build_task, seed_rank


@dataclass(frozen=True, kw_only=True)
class Job:
    """A config, and what the command line says about starting it."""

    config: TrainConfig
    resume: str = "never"
    """never: the folder must be free; auto: continue what is there; must: there must be some."""
    checkpoint: Path | None = None
    """A run folder or checkpoint that was named for resuming."""
    parallelism_given: bool = False
    """Whether degrees were given as flags."""
    accumulation_given: bool = False
    """Whether the accumulation was given as a flag."""
    allow_batch_change: bool = False
    """Accept another global batch on resume."""
    notes: tuple[str, ...] = ()
    """Lines to show at the start."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    folder: RunFolder
    step: int
    """Updates done."""
    preempted: bool = False

    @property
    def exit_code(self) -> int:
        """0 for a finished run, 75 for one that was asked to stop and saved."""
        return PREEMPTED if self.preempted else 0


def train(job: Job) -> Outcome:
    """Collective: every rank. Train from the job's start to its last step.

    Raises:
        ConfigError: wrong input, the same error on every rank.
    """
    world_size = launch_world_size()
    engine = Engine(parallelism=job.config.parallelism, accelerator=job.config.accelerator)
    start = engine.on_main(lambda: decide_start(job, world_size=world_size))
    return _finished(engine, start) or _train(engine, start)
