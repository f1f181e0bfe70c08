"""Where a run starts: afresh or from a checkpoint, decided before anything is built (phase 1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_ckpt import newest_intact, read_start, resolve_checkpoint
from parallel_config import ConfigError, Problem, Topology

from parallel_train.config import TrainConfig, read_config
from parallel_train.policies.registry import POLICIES
from parallel_train.resume import adapt, differences, global_batch, resolved_config
from parallel_train.run_folder import RunFolder, default_output_dir

if TYPE_CHECKING:
    from parallel_train.train import Job


@dataclass(frozen=True, kw_only=True)
class Start:
    """The decision, the same on every rank."""

    folder: RunFolder
    config: TrainConfig
    """With the degrees as decided."""
    topology: Topology
    checkpoint: Path | None = None
    """The step folder to continue; None starts afresh."""
    notes: tuple[str, ...] = ()
    """Lines to show, each once."""


def decide_start(job: Job, *, world_size: int) -> Start:
    """Look at the folder and the job; touches no file.

    Raises:
        ConfigError: a run is in the way, there is none to continue, or its checkpoint does not
            fit this launch.
    """
    folder, checkpoint, notes = _find(job)
    if checkpoint is None:
        topology = job.config.parallelism.resolve(world_size)
        config = resolved_config(job.config, topology)
        return Start(folder=folder, config=config, topology=topology, notes=(*job.notes, *notes))
    return _continue(job, folder, checkpoint, world_size, (*job.notes, *notes))


def _find(job: Job) -> tuple[RunFolder, Path | None, tuple[str, ...]]:
    """The run folder, the checkpoint to continue (None: start afresh) and lines to show."""
    if job.checkpoint is not None:
        return _named(job.checkpoint, job.config.checkpoint.verify)
    name = job.config.output_dir or default_output_dir(POLICIES.name_of(job.config.policy))
    folder = RunFolder(Path(name))
    if job.resume == "never":
        if folder.holds_run():
            raise ConfigError(
                Problem(
                    "output_dir",
                    f"= {name!r} already holds a run.",
                    f"Continue it with `ptrain resume {name}` or --resume auto, or use another "
                    "--output_dir.",
                )
            )
        return folder, None, ()
    checkpoint, skipped = newest_intact(folder.path, verify=job.config.checkpoint.verify)
    if checkpoint is None and job.resume == "must":
        raise ConfigError(
            Problem(
                "output_dir",
                f"= {name!r} holds no intact checkpoint to resume.",
                "Use --resume auto to start afresh in that case.",
            )
        )
    return folder, checkpoint, _skipped_lines(skipped)


def _named(path: Path, verify: str) -> tuple[RunFolder, Path, tuple[str, ...]]:
    """A checkpoint named outright is used or refused; a run folder means its newest intact one."""
    run = RunFolder(path)
    if run.checkpoints.is_dir():
        checkpoint, skipped = newest_intact(path, verify=verify)
        if checkpoint is not None:
            return run, checkpoint, _skipped_lines(skipped)
    checkpoint = Path(resolve_checkpoint(path))
    return RunFolder(checkpoint.parent.parent), checkpoint, ()


def _skipped_lines(skipped: list[tuple[Path, str]]) -> tuple[str, ...]:
    return tuple(f"skipped {path}: {reason}" for path, reason in skipped)


def _continue(
    job: Job, folder: RunFolder, checkpoint: Path, world_size: int, notes: tuple[str, ...]
) -> Start:
    saved = read_config(
        checkpoint / "pretrained_model" / "train_config.json",
        trusted=False,
        repeated_type=POLICIES.name_of(job.config.policy),
    ).config
    manifest = read_start(checkpoint, verify="fast").manifest
    adapted = adapt(
        job.config,
        world_size=world_size,
        saved_topology=manifest.topology,
        saved_global_batch=global_batch(saved, manifest.topology),
        parallelism_given=job.parallelism_given,
        accumulation_given=job.accumulation_given,
        allow_batch_change=job.allow_batch_change,
    )
    lines = (f"resuming {checkpoint} (step {manifest.step})", *notes, *adapted.notes)
    changed = tuple(f"changed {line}" for line in differences(saved, adapted.config))
    return Start(
        folder=folder,
        config=adapted.config,
        topology=adapted.topology,
        checkpoint=checkpoint,
        notes=(*lines, *changed),
    )
