"""The story of a run, from a job to its last checkpoint. Read this first.

decide     where the run starts: afresh, or from a checkpoint
open       phase 1 of a resume: step, data position, random states, before anything is built
build      data, policy, optimizer, schedule
prepare    the engine shards and wraps them
fill       phase 2 of a resume: weights, optimizer and schedule, in place
loop       one report per optimizer update; sinks show it, the saver keeps it
publish    where asked for: checked before anything is built, sent when the ranks have parted
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallel_ckpt import CheckpointSaver, StepFolder, read_start
from parallel_ckpt import Start as Opened
from parallel_config import ConfigError
from parallel_config.environment import LaunchFacts, check_environment
from parallel_engine import Engine, any_rank, connect, from_main, together
from parallel_train.config import SCHEMA
from parallel_train.data.fetch import fetch_frames
from parallel_train.data.metadata import Metadata, read_metadata
from parallel_train.hub.run_publisher import RunPublisher, finished_hint
from parallel_train.metrics.mfu import samples_per_s_at_peak
from parallel_train.metrics.open import open_sinks
from parallel_train.metrics.sinks import Sinks
from parallel_train.metrics.trackers import check_tracking
from parallel_train.run.fit import misfits
from parallel_train.run.folder import RunFiles
from parallel_train.run.job import Job, provenance, under_environment
from parallel_train.run.lines import headline, overview, stopped_before, summary
from parallel_train.run.loop import Loop
from parallel_train.run.prepare import Prepared, fill, prepare
from parallel_train.run.same_data import TrainedBefore, sizes
from parallel_train.run.signals import StopRequest
from parallel_train.run.start import DecidedJob, decide_job
from parallel_train.run.task import build_task, mean_over_padding, never_trained, seed_rank


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    files: RunFiles
    step: int
    """Updates done."""
    preempted: bool = False
    """Whether the run was asked to stop, and saved, before its last update."""
    publisher: RunPublisher | None = None
    """What is left to do once the ranks have parted: its `finish`. None: nothing is published."""


def train(job: Job, stop: StopRequest, facts: LaunchFacts | None = None) -> Outcome:
    """Collective: every rank. Train from the job's start to its last step, or to a request to stop.

    `facts` are what `connect` returned, where the caller has called `check_environment` and
    `connect` already. None does both here.

    Raises:
        ConfigError: wrong input or a damaged checkpoint, the same on every rank.
    """
    if facts is None:
        check_environment()
        facts = connect()
    job = under_environment(job)
    decided = decide_job(job, world_size=facts.world_size)
    config = decided.config
    from_main(lambda: check_tracking(config.logging))
    opened = None
    if decided.checkpoint is not None:
        opened = read_start(decided.checkpoint, topology=decided.topology, verify=decided.verify)
    step = opened.step if opened else 0
    over = _over_already(decided, stop, step, is_main=facts.is_main)
    if over is not None:
        return over
    dataset = config.dataset
    # The first part that needs it reads it, and no part reads it again: on a network file system
    # each file takes its time.
    metadata = functools.cache(lambda: read_metadata(dataset.folder, dataset.rename))
    publisher = RunPublisher(
        config, decided.files, decided.topology, is_main=facts.is_main, metadata=metadata
    )
    # Before anything is built or written: a token may be wrong, and training takes days.
    publisher.check()
    loop, notes = _make_ready(job, decided, opened, publisher, metadata, facts)
    done = _carry_out(loop, notes, decided, opened, publisher, stop)
    return Outcome(
        files=decided.files,
        step=done,
        preempted=done < config.steps,
        publisher=publisher if config.publish.wants_hub else None,
    )


def _make_ready(
    job: Job,
    decided: DecidedJob,
    opened: Opened | None,
    publisher: RunPublisher,
    metadata: Callable[[], Metadata],
    facts: LaunchFacts,
) -> tuple[Loop, list[str]]:
    """Collective: every rank. Build, prepare and fill; what is to run, and lines for the log."""
    config, files = decided.config, decided.files
    step, samples = (opened.step, opened.samples_seen) if opened else (0, 0)
    # The process is this command's own, so the switches of the process are too.
    accelerator = config.accelerator.decided(on_cuda=torch.cuda.is_available())
    engine = Engine(parallelism=config.parallelism, accelerator=accelerator, facts=facts)
    fetch_frames(config.dataset, together(metadata), config.policy.camera_names, config.eval)
    task = together(
        lambda: build_task(
            config,
            decided.topology,
            engine.rank,
            samples_seen=samples,
            device=engine.device,
            before=_trained_before(job, decided, opened) if opened else None,
            metadata=metadata(),
        )
    )
    # Nothing was written so far: a run that is refused leaves no folder behind.
    from_main(lambda: files.create(config.dataset.folder))
    saver = _open_saver(job, decided, publisher)
    prepared = prepare(engine, task, config)
    notes = [*decided.notes, *(opened.notes if opened else ()), *task.notes]
    notes += _fill(prepared, decided, saver)
    peak, why = samples_per_s_at_peak(
        config, task.dataset, engine.device, decided.topology.world_size
    )
    unweighed = mean_over_padding(config, task.model, task.dataset)
    notes += filter(None, [why, never_trained(config, task.dataset), unweighed])
    text = SCHEMA.dump(config)
    from_main(lambda: files.begin(text, step, keep_former=bool(decided.left_out)))
    # After everything that draws initial weights: those depend on the seed alone, not on the rank.
    seed_rank(config.seed, engine.rank)
    loop = Loop(
        config=config,
        engine=engine,
        prepared=prepared,
        saver=saver,
        sinks=together(
            lambda: (
                open_sinks(config, files.path, files.metrics, step) if engine.is_main else Sinks()
            )
        ),
        train_config=text,
        model_files=task.model_files,
        start_step=step,
        start_samples=samples,
        data_sizes=sizes(task.dataset),
        peak_samples_per_s=peak,
    )
    notes += [
        *misfits(config),
        *overview(config, decided.topology, task, prepared.model, engine.device),
    ]
    return loop, [*notes, headline(decided, task.num_parameters)]


def _open_saver(job: Job, decided: DecidedJob, publisher: RunPublisher) -> CheckpointSaver:
    """Collective: every rank. It locks the run folder for this run."""
    return CheckpointSaver(
        decided.files.path,
        topology=decided.topology,
        config=decided.config.checkpoint,
        checkpoint_format=decided.config.checkpoint_format,
        provenance=provenance(job),
        on_commit=publisher.push,
        resumed_from=decided.checkpoint,
    )


def _fill(prepared: Prepared, decided: DecidedJob, saver: CheckpointSaver) -> Sequence[str]:
    """Collective: every rank. Phase 2 of a resume, if it is one; lines for the log."""
    if decided.checkpoint is None:
        return ()
    try:
        return fill(
            prepared,
            decided.checkpoint,
            decided.changed,
            allow_optimizer_change=decided.allow_optimizer_change,
        )
    except ConfigError:
        # The same on every rank. A process that goes on must not keep the run locked.
        saver.close(failed=True)
        raise


def _carry_out(
    loop: Loop,
    notes: Sequence[str],
    decided: DecidedJob,
    opened: Opened | None,
    publisher: RunPublisher,
    stop: StopRequest,
) -> int:
    """Collective: every rank. Run the loop, then stage its model; the updates done."""
    # Left in the reverse order: sinks close first, the saver waits for its last write, and only
    # then do the other ranks learn of an error here.
    with loop.engine.telling_peers(), loop.saver, loop.sinks as sinks:
        for line in notes:
            sinks.note(line)
        began = time.perf_counter()
        done = loop.run(stop, opened.restore_rng if opened else None)
        sinks.note(summary(decided, loop.start_step, done, time.perf_counter() - began))
        # A run that was stopped goes on later: its model is not the one to publish.
        if done == loop.config.steps:
            with loop.prepared.averaged():
                publisher.stage(loop.prepared.model, step=done, files=loop.model_files)
    return done


def _over_already(
    decided: DecidedJob, stop: StopRequest, step: int, *, is_main: bool
) -> Outcome | None:
    """Collective: every rank. How a run ends that has nothing to do, or was asked to stop."""
    config, files = decided.config, decided.files
    if step >= config.steps:
        if is_main:
            hint = finished_hint(config.publish, files)
            print(f"{files.path} is finished: step {step} of {config.steps}{hint}", flush=True)
        return Outcome(files=files, step=step)
    if any_rank(stop.received is not None):  # before minutes go into building a big model
        if is_main:
            print(stopped_before(step, config.steps))
        return Outcome(files=files, step=step, preempted=True)
    return None


def _trained_before(job: Job, decided: DecidedJob, opened: Opened) -> TrainedBefore | None:
    """What the checkpoint tells of the data, for the check that the weights still fit them."""
    if decided.checkpoint is None:
        return None
    return TrainedBefore(
        folder=StepFolder(decided.checkpoint).pretrained_model,
        data_state=opened.data_state,
        new_statistics=job.stats_given or "dataset.stats" in decided.changed,
    )
