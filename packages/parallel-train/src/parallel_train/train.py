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

import dataclasses
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_ckpt import CheckpointSaver, StepFolder, read_start, restore
from parallel_ckpt import Start as Opened
from parallel_config.environment import accelerate_variables, check_environment, environment_wins
from parallel_engine import Ema, Engine, any_rank, connect, from_main, resume_average, together
from parallel_engine.loaders import prepare_loader
from parallel_train.config import SCHEMA, TrainConfig
from parallel_train.hub.run_publisher import RunPublisher, finished_hint
from parallel_train.metrics.mfu import samples_per_s_at_peak
from parallel_train.metrics.sinks import JsonlSink, Sinks, console_sink
from parallel_train.metrics.trackers import check_tracking, tracking_sinks
from parallel_train.policies.registry import POLICIES
from parallel_train.run.adapt import kept_hyperparameters
from parallel_train.run.folder import RunFolder
from parallel_train.run.loop import Loop, Prepared
from parallel_train.run.same_data import TrainedBefore, sizes
from parallel_train.run.signals import PREEMPTED, StopRequest
from parallel_train.run.start import Start, decide_start, under_environment
from parallel_train.run.task import HeldOut, Task, build_task, never_trained, seed_rank


@dataclass(frozen=True, kw_only=True)
class Job:
    """A config, and what the command line says about starting it."""

    config: TrainConfig
    resume: str = "never"
    """never: the folder must be free; auto: continue what is there; must: there must be some."""
    checkpoint: Path | None = None
    """A run folder or checkpoint that was named for resuming."""
    output_dir_given: bool = False
    """Whether the output folder was given as a flag."""
    parallelism_given: bool = False
    """Whether degrees were given as flags."""
    parallelism_in_file: bool = False
    """Whether the config file gives degrees: on resume they count where they are new there."""
    accumulation_given: bool = False
    """Whether the accumulation was given as a flag."""
    stats_given: bool = False
    """Whether the source of statistics was given as a flag: a resumed run then takes them anew."""
    allow_batch_change: bool = False
    """Accept another global batch on resume."""
    notes: tuple[str, ...] = ()
    """Lines to show at the start."""
    overridden: tuple[str, ...] = ()
    """What accelerate's variables changed in the config, where they are allowed to."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    folder: RunFolder
    step: int
    """Updates done."""
    preempted: bool = False
    publisher: RunPublisher | None = None
    """What is left to do once the ranks have parted: its `finish`. None: nothing is published."""

    @property
    def exit_code(self) -> int:
        """0 for a finished run, 75 for one that was asked to stop and saved."""
        return PREEMPTED if self.preempted else 0


def train(job: Job, stop: StopRequest) -> Outcome:
    """Collective: every rank. Train from the job's start to its last step, or to a request to stop.

    Raises:
        ConfigError: wrong input or a damaged checkpoint, the same on every rank.
    """
    check_environment()
    job = under_environment(job)
    facts = connect()
    start = decide_start(job, world_size=facts.world_size)
    config = start.config
    from_main(lambda: check_tracking(config.logging))
    opened = None
    if start.checkpoint is not None:
        opened = read_start(start.checkpoint, topology=start.topology, verify=start.verify)
    step = opened.step if opened else 0
    over = _over_already(start, stop, step, is_main=facts.is_main)
    if over is not None:
        return over
    publisher = RunPublisher(config, start.folder, start.topology, is_main=facts.is_main)
    publisher.check()
    loop, notes = _make_ready(job, start, opened, publisher)
    done = _carry_out(loop, notes, start, opened, publisher, stop)
    return Outcome(
        folder=start.folder,
        step=done,
        preempted=done < config.steps,
        publisher=publisher if config.publish.wants_hub else None,
    )


def _make_ready(
    job: Job, start: Start, opened: Opened | None, publisher: RunPublisher
) -> tuple[Loop, list[str]]:
    """Collective: every rank. Build, prepare and fill; what is to run, and lines for the log."""
    config = start.config
    step, samples = (opened.step, opened.samples_seen) if opened else (0, 0)
    engine = Engine(parallelism=config.parallelism, accelerator=config.accelerator)
    task = together(
        lambda: build_task(
            config,
            start.topology,
            engine.rank,
            samples_seen=samples,
            device=engine.device,
            before=_trained_before(job, start, opened.data_state) if opened else None,
        )
    )
    from_main(start.folder.create)
    saver = CheckpointSaver(
        start.folder.path,
        topology=start.topology,
        config=config.checkpoint,
        checkpoint_format=config.checkpoint_format,
        provenance=_provenance(job),
        on_commit=publisher.push,
    )
    prepared = _prepare(engine, task, config)
    notes = [*start.notes, *(opened.notes if opened else ()), *task.notes]
    if start.checkpoint is not None:
        notes += _fill(prepared, start, start.checkpoint)
    peak, why = samples_per_s_at_peak(
        config, task.dataset, engine.device, start.topology.world_size
    )
    notes += filter(None, [why, never_trained(config, task.dataset)])
    text = SCHEMA.dump(config)
    from_main(lambda: _open_folder(start, text, step))
    seed_rank(config.seed, engine.rank)
    loop = Loop(
        config=config,
        engine=engine,
        prepared=prepared,
        saver=saver,
        sinks=together(lambda: _sinks(engine.is_main, start, step)),
        train_config=text,
        model_files=task.model_files,
        start_step=step,
        start_samples=samples,
        data_sizes=sizes(task.dataset),
        peak_samples_per_s=peak,
    )
    return loop, [*notes, _headline(start, task.num_parameters)]


def _carry_out(
    loop: Loop,
    notes: Sequence[str],
    start: Start,
    opened: Opened | None,
    publisher: RunPublisher,
    stop: StopRequest,
) -> int:
    """Collective: every rank. Run the loop, then stage its model; the updates done."""
    with loop.engine.telling_peers(), loop.saver, loop.sinks as sinks:
        for line in notes:
            sinks.note(line)
        began = time.perf_counter()
        done = loop.run(stop, opened.restore_rng if opened else None)
        sinks.note(_summary(start, loop.start_step, done, time.perf_counter() - began))
        if done == loop.config.steps:
            with loop.prepared.averaged():
                publisher.stage(loop.prepared.model, step=done, files=loop.model_files)
    return done


def _over_already(start: Start, stop: StopRequest, step: int, *, is_main: bool) -> Outcome | None:
    """Collective: every rank. How a run ends that has nothing to do, or was asked to stop."""
    config, folder = start.config, start.folder
    if step >= config.steps:
        if is_main:
            hint = finished_hint(config.publish, folder)
            print(f"{folder.path} is finished: step {step} of {config.steps}{hint}", flush=True)
        return Outcome(folder=folder, step=step)
    if any_rank(stop.received is not None):  # before minutes go into building a big model
        if is_main:
            print(f"stopped on request before the first update: step {step} of {config.steps}")
        return Outcome(folder=folder, step=step, preempted=True)
    return None


def _provenance(job: Job) -> dict[str, object]:
    """What every manifest remembers beside the resolved config."""
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


def _open_folder(start: Start, text: str, step: int) -> None:
    if start.left_out:
        start.folder.keep_config(step)
    start.folder.write_config(text)
    start.folder.drop_metrics_after(step)


def _sinks(is_main: bool, start: Start, step: int) -> Sinks:
    if not is_main:
        return Sinks()
    config = start.config
    console = console_sink(steps=config.steps, start=step, log_freq=config.log_freq)
    others = tracking_sinks(config.logging, start.folder.path, step, SCHEMA.to_document(config))
    return Sinks([JsonlSink(start.folder.metrics), *others, console])


def _prepare(engine: Engine, task: Task, config: TrainConfig) -> Prepared:
    """Collective: every rank. Shard and wrap what was built."""
    optimizer: Any = task.build_optimizer
    scheduler: Any = task.build_scheduler
    if not config.meta_init:  # built before the model is cut, as for one process
        optimizer = optimizer(task.model)
        scheduler = scheduler(optimizer)
    model, optimizer, scheduler, loader = engine.prepare(
        task.model, optimizer, scheduler, task.loader, fill=task.fill
    )
    return Prepared(
        model,
        optimizer,
        scheduler,
        loader,
        task.loss_fn,
        ema=Ema(model, optimizer, config.ema) if config.ema.decay is not None else None,
        held_out=_on_device(task.held_out, engine),
    )


def _trained_before(job: Job, start: Start, data_state: Any) -> TrainedBefore | None:
    if start.checkpoint is None:
        return None
    return TrainedBefore(
        folder=StepFolder(start.checkpoint).pretrained_model,
        data_state=data_state,
        new_statistics=job.stats_given or "dataset.stats" in start.changed,
    )


def _fill(prepared: Prepared, start: Start, checkpoint: Path) -> list[str]:
    """Collective: every rank. Phase 2 of a resume; lines for the log."""
    restore(
        checkpoint,
        prepared.model,
        prepared.optimizer,
        prepared.scheduler,
        keep=kept_hyperparameters(start.changed),
    )
    line = resume_average(prepared.model, prepared.optimizer, prepared.ema)
    return [line] if line else []


def _on_device(held_out: HeldOut | None, engine: Engine) -> HeldOut | None:
    if held_out is None:
        return None
    loader = prepare_loader(held_out.loader, engine.accelerator, engine.device)
    return dataclasses.replace(held_out, loader=loader)


def _headline(start: Start, num_parameters: int) -> str:
    return (
        f"training {num_parameters:,} parameters on {start.topology.describe()}, "
        f"into {start.folder.path}"
    )


def _summary(start: Start, begun: int, done: int, seconds: float) -> str:
    folder, steps = start.folder, start.config.steps
    if done == begun:
        return f"stopped on request before the first update: step {done} of {steps}"
    state = "finished" if done >= steps else "stopped on request, checkpoint written"
    goal = steps if done < steps else 2 * steps
    name = POLICIES.name_of(start.config.policy)
    # A class named by path is taken from a checkpoint only when the user names it too.
    repeated = f" --policy.type {name}" if ":" in name else ""
    return "\n".join(
        [
            f"{state}: step {done} of {steps} after {seconds:.0f} s",
            f"  look:    ptrain inspect {shlex.quote(str(folder.last))}",
            f"  go on:   ptrain resume {shlex.quote(str(folder.path))}{repeated} --steps {goal}",
            f"  numbers: {folder.metrics}",
        ]
    )
