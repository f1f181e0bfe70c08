"""The lines that a run prints at its start and at its end."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from parallel_config import Topology
from parallel_engine.wrapping import unit_sizes
from parallel_train.config import TrainConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.opening import left_out
from parallel_train.policies.registry import POLICIES
from parallel_train.run.adapt import global_batch
from parallel_train.run.start import DecidedJob
from parallel_train.run.task import Task


def overview(
    config: TrainConfig, topology: Topology, task: Task, model: nn.Module, device: torch.device
) -> Iterator[str]:
    """What is about to run, before its first update: data, batch, devices, wrap units.

    `model` is what the engine made of the task's.
    """
    held_out = ""
    if task.held_out is not None:
        data = task.held_out.loader.dataset
        assert isinstance(data, LeRobotDataset)
        held_out = f"; held out: {_extent(data)}"
    yield f"data: {_extent(task.dataset)} of {config.dataset.folder}{held_out}"
    yield from left_out(task.dataset, config.policy)
    transforms = config.dataset.image_transforms
    if transforms.enable:
        yield (
            f"pictures: changed at random by {transforms.max_num_transforms} of "
            f"{', '.join(transforms.ranges)}"
        )
    batch = global_batch(config, topology)
    accumulation = config.accelerator.gradient_accumulation.steps
    passes = batch * config.steps / max(1, len(task.dataset))
    yield (
        f"global batch: {batch:,} samples = batch_size {config.batch_size} x "
        f"{topology.dp_world_size} rank(s) x {accumulation} micro-batch(es); {config.steps:,} "
        f"updates see the data {passes:.3g} times"
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision = config.accelerator.mixed_precision
    yield (
        f"devices: {topology.world_size} x {name}, mixed_precision {precision}"
        f"{_switches(config, device)}"
    )
    if topology.dp_shard > 1:
        units = Counter(type(model.get_submodule(u)).__name__ for u in unit_sizes(model) if u)
        yield "wrap units: " + ", ".join(f"{count} {_bare(n)}" for n, count in units.items())
    yield "the first update is shown as soon as it is done; it is slower than those after it"


def _switches(config: TrainConfig, device: torch.device) -> str:
    """What decides speed against equal bits on CUDA, as it runs."""
    if device.type != "cuda":
        return ""
    ran = config.accelerator.decided(on_cuda=True)
    shown = {"tf32": ran.tf32, "cudnn_benchmark": ran.cudnn_benchmark}
    on_off = ", ".join(f"{name} {'on' if value else 'off'}" for name, value in shown.items())
    return f", {on_off}, deterministic {'on' if ran.deterministic else 'off'}"


def _extent(dataset: LeRobotDataset) -> str:
    return f"{len(dataset):,} frames in {dataset.num_episodes:,} episode(s)"


def _bare(name: str) -> str:
    return name.removeprefix("FSDP")  # torch renames the class of a unit so


def headline(job: DecidedJob, num_parameters: int) -> str:
    """The line before the first update."""
    return (
        f"training {num_parameters:,} parameters on {job.topology.describe()}, "
        f"into {job.files.path}"
    )


def stopped_before(step: int, steps: int) -> str:
    """The line of a run that was asked to stop before its first update."""
    return f"stopped on request before the first update: step {step} of {steps}"


def summary(job: DecidedJob, begun: int, done: int, seconds: float) -> str:
    """How the run ended, and the commands that look at it and go on with it.

    `begun` and `done` are the updates before and after this start.
    """
    files, steps = job.files, job.config.steps
    # Nothing was trained, so there is no checkpoint of this start to name.
    if done == begun:
        return stopped_before(done, steps)
    state = "finished" if done >= steps else "stopped on request, checkpoint written"
    # A finished run goes on only with more steps.
    goal = steps if done < steps else 2 * steps
    name = POLICIES.name_of(job.config.policy)
    # A class named by path is taken from a checkpoint only when the user names it too.
    repeated = f" --policy.type {name}" if ":" in name else ""
    return "\n".join(
        [
            f"{state}: step {done} of {steps} after {seconds:.0f} s",
            f"  look:    ptrain inspect {shlex.quote(str(files.last))}",
            f"  go on:   ptrain resume {shlex.quote(str(files.path))}{repeated} --steps {goal}",
            f"  numbers: {files.metrics}",
        ]
    )
