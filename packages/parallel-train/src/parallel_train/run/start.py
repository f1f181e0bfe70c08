"""Decides where a run starts, afresh or from a checkpoint, before anything is built."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt import (
    CheckpointError,
    mend_run,
    newest_intact,
    resolve_checkpoint,
)
from parallel_ckpt import layout as ckpt_layout
from parallel_ckpt.layout import StepFolder
from parallel_ckpt.store.integrity import Verify
from parallel_ckpt.store.lock import RunLock
from parallel_ckpt.store.manifest import Manifest
from parallel_config import ConfigError, Problem, Topology
from parallel_engine import from_main
from parallel_train.config import TrainConfig
from parallel_train.data.fetch import locate_on_ranks
from parallel_train.policies.registry import POLICIES
from parallel_train.run.adapt import (
    adapt,
    changed_paths,
    differences,
    global_batch,
    resolved_config,
)
from parallel_train.run.folder import RunFiles, default_output_dir
from parallel_train.run.job import Job
from parallel_train.run.saved import SavedRun

WRITER_S = 120.0
"""How long a resumed run waits for the process that still writes it to leave."""


@dataclass(frozen=True, kw_only=True)
class DecidedJob:
    """The decision, the same on every rank."""

    files: RunFiles
    config: TrainConfig
    """With the degrees as decided."""
    topology: Topology
    checkpoint: Path | None = None
    """The step folder to continue; None starts afresh."""
    verify: Verify = "fast"
    """How its files are yet to be checked: the newest of a folder was chosen by its checksums."""
    changed: frozenset[str] = frozenset()
    """Paths of fields that differ from the checkpoint's config."""
    allow_optimizer_change: bool = False
    """Whether an optimizer of another class than the checkpoint's starts its state anew."""
    left_out: tuple[str, ...] = ()
    """Keys of the checkpoint's config that only another version knows."""
    notes: tuple[str, ...] = ()
    """Lines to show."""


def decide_job(job: Job, *, world_size: int) -> DecidedJob:
    """Collective: every rank. Look at the folder and the job, and mend what a dead save left.

    Raises:
        ConfigError: a run is in the way, a run to continue is missing, or its checkpoint is damaged
            or does not fit this launch.
    """
    files, named = from_main(lambda: _locate(job))
    notes = list(job.notes)
    if named is not None and named.name.startswith("."):
        # A killed save has moved it aside. The saver would put it back while it is being read.
        step = ckpt_layout.step_of(named.name)
        assert step is not None
        notes += _mend(files)
        named = ckpt_layout.RunFolder(files.path).step(step).path
    checkpoint = named
    if named is None and job.resume != "never":
        notes += _mend(files)
        checkpoint, skipped = newest_intact(files.path, verify=job.config.checkpoint.verify)
        for path, reason in skipped:
            # Most reasons begin with the path, or with that of a file in it.
            where = "" if reason.startswith(str(path)) else f"{path}: "
            notes.append(f"skipped {where}{reason}")
        # With "auto" an empty folder is a fresh start.
        if checkpoint is None and (skipped or job.resume == "must"):
            raise _nothing_intact(files, notes)
    decided = from_main(lambda: _decide(job, files, checkpoint, world_size, notes))
    config = dataclasses.replace(decided.config, dataset=locate_on_ranks(decided.config.dataset))
    decided = dataclasses.replace(decided, config=config)
    if named is None:
        return decided
    return dataclasses.replace(decided, verify=job.config.checkpoint.verify)


def _nothing_intact(files: RunFiles, notes: list[str]) -> ConfigError:
    """Damage everywhere does not mean a fresh start, which would write over what can be mended."""
    remedy = "Use --resume auto to start a new run in that case."
    if notes:
        remedy = "\n".join(["Repair these, or move them away to start a new run.", *notes])
    return ConfigError(
        Problem(
            "output_dir",
            f"= {str(files.path)!r} does not hold an intact checkpoint to resume.",
            remedy,
        )
    )


def _mend(files: RunFiles) -> list[str]:
    """Collective: every rank. Put right what a save that was killed left half done.

    A step that was being replaced may lie aside; it must be back before the newest is looked for.
    """
    lines: list[str] = []
    if from_main(files.holds_run):
        lines += from_main(lambda: _wait_for_writer(files))
        lines += mend_run(files.path)
    return lines


def _wait_for_writer(files: RunFiles) -> list[str]:
    """Let the former process of a requeued job finish its last save; lines about its lock.

    Raises:
        CheckpointError: it writes on after `WRITER_S`: two jobs were given one run.
    """
    deadline = time.monotonic() + WRITER_S
    told = False
    while True:
        try:
            lock, notes = RunLock.acquire(ckpt_layout.RunFolder(files.path).lock)
            # Only looked at: the saver takes the lock once the run is built.
            lock.release()
            return notes
        except OSError:
            return []  # mend_run, which comes next, meets the same and says it in one line
        except CheckpointError as error:
            if time.monotonic() > deadline:
                raise
            if not told:
                print(f"waiting up to {WRITER_S:.0f} s for the run's writer: {error}", flush=True)
                told = True
            time.sleep(0.2)


def _locate(job: Job) -> tuple[RunFiles, Path | None]:
    """The run folder, and the checkpoint where one was named outright."""
    if job.checkpoint is not None:
        files, checkpoint = _named(job.checkpoint)
        _require_own_folder(job, files)
        return files, checkpoint
    if job.resume != "never" and job.config.output_dir is None:
        raise ConfigError(
            Problem(
                "output_dir",
                f"= None with --resume {job.resume}: such a run gets a new folder at each start, "
                "and would never find its checkpoints again.",
                "Use --output_dir.",
            )
        )
    name = job.config.output_dir or default_output_dir(POLICIES.name_of(job.config.policy))
    files = RunFiles(Path(name))
    if job.resume == "never" and files.holds_run():
        raise ConfigError(
            Problem(
                "output_dir",
                f"= {name!r} already holds a run.",
                f"Continue it with `ptrain resume {name}` or --resume auto, or use another "
                "--output_dir.",
            )
        )
    return files, None


def _named(path: Path) -> tuple[RunFiles, Path | None]:
    """What a path that was named outright means: a run, or one checkpoint of it."""
    run = RunFiles(path.expanduser().absolute())
    if run.checkpoints.is_dir():
        resolve_checkpoint(run.path)  # raises where there is none
        return run, None
    step = resolve_checkpoint(path)
    return RunFiles(step.parent.parent), step


def _require_own_folder(job: Job, files: RunFiles) -> None:
    other = job.config.output_dir
    if job.output_dir_given and other and Path(other).resolve() != files.path.resolve():
        raise ConfigError(
            Problem(
                "output_dir",
                f"= {other!r}, but a run continues in its own folder, {str(files.path)!r}.",
                "Leave it out. To continue elsewhere, copy the run's folder and resume the copy.",
            )
        )


def _changes_unnamed_optimizer(
    manifest: Manifest, saved: TrainConfig, now: TrainConfig, *, allowed: bool
) -> bool:
    """Whether the optimizer changes where the checkpoint does not name its class.

    Checkpoints of format_version 1 do not. Of later ones `restore` compares the class; what the
    configs can tell is refused here, before a model is built.

    Raises:
        ConfigError: the configs name different optimizers, and the change is not allowed.
    """
    if saved.optimizer.type == now.optimizer.type:
        return False
    if allowed:
        return not manifest.names_optimizer
    raise ConfigError(
        Problem(
            "optimizer.type",
            f"= {now.optimizer.type!r}, but the checkpoint holds the state of "
            f"{saved.optimizer.type!r}.",
            f"Use --optimizer.type {saved.optimizer.type}, or --allow_optimizer_change, which "
            "starts its state anew.",
        )
    )


def _is_new_in_file(job: Job, manifest: Manifest) -> bool:
    """Whether the config file gives other degrees than it did when the checkpoint was written.

    The same ones were meant for the ranks of then: a requeue on others keeps the kind.
    """
    now, then = job.config.parallelism, manifest.provenance
    declared = (then.get("declared_dp_replicate"), then.get("declared_dp_shard"))
    return job.parallelism_in_file and declared != (now.dp_replicate, now.dp_shard)


def _decide(
    job: Job, files: RunFiles, checkpoint: Path | None, world_size: int, notes: list[str]
) -> DecidedJob:
    if checkpoint is None:
        topology = job.config.parallelism.resolve(world_size)
        config = resolved_config(job.config, topology)
        return DecidedJob(files=files, config=config, topology=topology, notes=tuple(notes))
    before = job.saved
    if before is None or not before.is_of(checkpoint):
        name = POLICIES.name_of(job.config.policy)
        before = SavedRun.read(StepFolder(checkpoint), repeated_type=name)
    saved, manifest, loaded = before.loaded.config, before.manifest, before.loaded
    notes += [note for note in loaded.notes if note not in notes]  # of `resume` they are known
    unnamed = _changes_unnamed_optimizer(
        manifest, saved, job.config, allowed=job.allow_optimizer_change
    )
    adapted = adapt(
        job.config,
        world_size=world_size,
        saved_topology=manifest.topology,
        saved_global_batch=global_batch(saved, manifest.topology),
        parallelism_given=job.parallelism_given or _is_new_in_file(job, manifest),
        accumulation_given=job.accumulation_given,
        allow_batch_change=job.allow_batch_change,
    )
    lines = [f"resuming {checkpoint} (step {manifest.step})", *notes, *adapted.notes]
    lines += [f"changed {line}" for line in differences(saved, adapted.config)]
    return DecidedJob(
        files=files,
        config=adapted.config,
        topology=adapted.topology,
        checkpoint=checkpoint,
        changed=changed_paths(saved, adapted.config),
        allow_optimizer_change=job.allow_optimizer_change and (manifest.names_optimizer or unnamed),
        left_out=loaded.left_out,
        notes=tuple(lines),
    )
