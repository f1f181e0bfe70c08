"""A job: what the command line asks of one run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from parallel_config import with_environment
from parallel_config.environment import accelerate_variables, environment_wins
from parallel_train.config import TrainConfig

if TYPE_CHECKING:
    from parallel_train.run.saved import SavedRun

ResumeMode = Literal["never", "auto", "must"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A config, and what the command line says about starting it."""

    config: TrainConfig
    resume: ResumeMode = "never"
    """never: the folder must be free. auto: continue the run in it, if there is one. must: continue
    it, or fail."""
    checkpoint: Path | None = None
    """A run folder or a checkpoint that was named for resuming."""
    saved: SavedRun | None = None
    """The checkpoint whose config the flags went over, if there was one."""
    output_dir_given: bool = False
    """Whether the output folder was given as a flag."""
    parallelism_given: bool = False
    """Whether degrees were given as flags."""
    parallelism_in_file: bool = False
    """Whether the config file gives degrees. A resume follows them only if they have changed."""
    accumulation_given: bool = False
    """Whether the accumulation was given as a flag."""
    stats_given: bool = False
    """Whether the source of statistics was given as a flag. A resumed run then takes new ones."""
    allow_batch_change: bool = False
    """Accept another global batch on resume."""
    allow_optimizer_change: bool = False
    """Accept another class of optimizer on resume, whose state then starts anew."""
    notes: tuple[str, ...] = ()
    """Lines to show at the start."""
    overridden: tuple[str, ...] = ()
    """What accelerate's variables changed in the config, where they are allowed to."""


def under_environment(job: Job) -> Job:
    """The job with what accelerate's variables change, where they are allowed to; says so."""
    accelerator, lines = with_environment(job.config.accelerator)
    # Without permission the variables change nothing; `check_environment` has refused what would.
    if not environment_wins():
        return job
    counts = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in accelerate_variables()
    return dataclasses.replace(
        job,
        config=dataclasses.replace(job.config, accelerator=accelerator),
        accumulation_given=job.accumulation_given or counts,
        notes=(*job.notes, *(f"the environment wins: {line}" for line in lines)),
        overridden=lines,
    )


def provenance(job: Job) -> dict[str, object]:
    """What every manifest remembers beside the resolved config."""
    # As the user wrote them, -1 included: a requeue compares its file with these, not with the
    # degrees that were resolved.
    declared = job.config.parallelism
    facts: dict[str, object] = {
        "declared_dp_replicate": declared.dp_replicate,
        "declared_dp_shard": declared.dp_shard,
    }
    if environment_wins():
        facts["reproducible"] = False
        facts["environment"] = accelerate_variables()
        facts["environment_changes"] = list(job.overridden)
    return facts
