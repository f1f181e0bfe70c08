"""Builds what a config trains, the same way on every rank: data, policy, optimizer, schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from parallel_config import ConfigError, OptimizerConfig, Problem, Topology
from parallel_config.errors import report
from parallel_engine import Loss, LossFn, initialize, parameters_on_meta, unwrap
from parallel_engine.materialize import require_filled
from parallel_train.config import TrainConfig
from parallel_train.data.augment import Augmented
from parallel_train.data.lerobot import Batch, LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.metadata import Metadata, read_metadata
from parallel_train.data.order import GlobalBatchSampler, HeldOutSampler
from parallel_train.data.spec import ACTION, DataSpec
from parallel_train.data.split import split_episodes
from parallel_train.metrics.sinks import Row
from parallel_train.policies.answers import read_answer
from parallel_train.policies.factory import (
    build_policy,
    load_pretrained,
    policy_json,
)
from parallel_train.policies.processors import Preprocessor
from parallel_train.run.same_data import TrainedBefore


@dataclass(frozen=True)
class Task:
    """Everything that `engine.prepare` and the loop need, still unwrapped."""

    model: nn.Module
    """On the meta device with `meta_init`."""
    fill: Callable[[nn.Module], None] | None
    """Gives a model on meta its first values; None where a checkpoint does, or it has them."""
    build_optimizer: Callable[[nn.Module], Optimizer]
    build_scheduler: Callable[[Optimizer], LambdaLR]
    loader: DataLoader[Batch]
    loss_fn: LossFn[Batch]
    model_files: dict[str, bytes]
    """Files that are saved beside the weights, by name."""
    num_parameters: int
    dataset: LeRobotDataset
    """What is trained on."""
    held_out: HeldOut | None = None
    notes: tuple[str, ...] = ()
    """What a resumed run keeps of its former data, and what is new in them."""


@dataclass(frozen=True)
class HeldOut:
    """The part of the held-out data that falls to this rank."""

    loader: DataLoader[Batch]
    num_counted: int
    """Batches that count; those after them only keep the ranks in step."""


def build_task(
    config: TrainConfig,
    topology: Topology,
    rank: int,
    *,
    samples_seen: int,
    device: torch.device,
    before: TrainedBefore | None = None,
    metadata: Metadata | None = None,
) -> Task:
    """Build everything on this rank. Initial weights depend on the seed alone.

    `before` is for a resumed run: it goes on with the normalization that it was trained with.
    `metadata` is the dataset's, where it has been read already.

    Raises:
        ConfigError: the folder is not a dataset, the dataset does not fit the policy, or it is not
            what the weights of a resumed run were trained on.
    """
    is_new = samples_seen == 0  # a resumed model is filled from its checkpoint
    if is_new:
        report(getattr(config.policy, "new_run_problems", tuple)())
    dataset, held_out = build_datasets(config, metadata)
    found = list(getattr(config.policy, "data_problems", _no_problems)(dataset.spec))
    if is_new:
        report(found)
    # Before the model, whose building takes long: it refuses a batch that cannot be.
    sampler = GlobalBatchSampler(
        num_samples=len(dataset),
        batch_size=config.batch_size,
        accumulation=config.accelerator.gradient_accumulation.steps,
        dp_rank=topology.dp_rank(rank),
        dp_world_size=topology.dp_world_size,
        seed=config.seed,
        start_samples=samples_seen,
    )
    preprocessor = Preprocessor.from_stats(
        dataset.stats, config.policy.normalization(), config.dataset.rename
    )
    # A model that was trained so can only be told of it.
    notes = [f"{problem.path} {problem.message}" for problem in found]
    if before is not None:
        notes += before.check(dataset, config.policy)
        preprocessor, lines = before.preprocessor(preprocessor)
        notes += lines
    # The same on every rank: DDP and HSDP hold copies, which must begin alike.
    torch.manual_seed(config.seed)
    with parameters_on_meta() if config.meta_init else contextlib.nullcontext():
        model = build_policy(config.policy, dataset.spec)
    for name, (low, high) in getattr(config.policy, "value_ranges", dict)().items():
        for part in filter(None, (dataset, held_out)):
            part.check_range(name, low, high)
    if is_new and not config.meta_init:
        load_pretrained(model)
    load = partial(
        build_loader,
        num_workers=config.dataset.workers(device.type),
        prefetch_factor=config.dataset.prefetch_factor,
        pin_memory=device.type == "cuda" and config.dataset.pin_memory,
    )
    return Task(
        model=model,
        fill=_first_values if is_new and config.meta_init else None,
        build_optimizer=partial(build_optimizer, config.optimizer),
        build_scheduler=partial(build_scheduler, config),
        loader=load(_augmented(config, dataset), sampler),
        loss_fn=partial(policy_loss, preprocessor=preprocessor),
        model_files={
            "config.json": policy_json(config.policy, dataset.spec).encode(),
            **_files_of(preprocessor),
        },
        # Here, where the model is whole: later each rank has its shards.
        num_parameters=sum(p.numel() for p in model.parameters()),
        dataset=dataset,
        held_out=_held_out(config, topology, rank, held_out, load),
        notes=tuple(notes),
    )


def _no_problems(spec: DataSpec) -> Sequence[Problem]:
    return ()


def _first_values(model: nn.Module) -> None:
    """Collective: every rank. What building the model in memory would have given it, in place.

    Raises:
        ConfigError: modules draw no values of their own, or the policy cannot read pretrained
            weights into shards.
    """
    name = type(unwrap(model)).__name__
    try:
        initialize(model)
    except RuntimeError as error:
        way = "Correct the module's reset_parameters(), or use --no-meta_init."
        raise _without_values(
            f"drawing the values of {name} fails: {_first_line(error)}.", way
        ) from error
    try:
        # A module without reset_parameters() keeps what the memory happened to hold.
        require_filled(model)
    except ConfigError as error:  # it names the way of a library's user; here there is one
        way = "Give its modules a reset_parameters() that draws them, or use --no-meta_init."
        found = "; ".join(problem.message.rstrip(".") for problem in error.problems)
        raise _without_values(f"{name} {found}.", way) from None
    try:
        load_pretrained(unwrap(model))  # a ConfigError of its own says all
    except RuntimeError as error:
        message = f"{name} cannot read its pretrained weights into shards: {_first_line(error)}."
        raise _without_values(message, "Use --no-meta_init.") from error


def _without_values(message: str, way: str) -> ConfigError:
    return ConfigError(Problem("meta_init", f"= True, but {message}", way))


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")


def never_trained(config: TrainConfig, dataset: LeRobotDataset) -> str | None:
    """A line where a policy predicts further than any episode lasts: time spent for nothing."""
    asked = len(config.policy.delta_timestamps(dataset.fps).get(ACTION, ()))
    longest = max(episode.end - episode.first for episode in dataset.metadata.episodes)
    if asked <= longest:
        return None
    return (
        f"the policy predicts {asked:,} actions, but the longest episode has {longest:,} frames: "
        f"what comes after {longest:,} is computed, but never trained"
    )


def mean_over_padding(config: TrainConfig, model: nn.Module, dataset: LeRobotDataset) -> str | None:
    """A line where a policy does not state the weight of a loss whose entries may be padding.

    From the config: reading the flags of each batch would make the host wait for the device.
    """
    policy = unwrap(model)
    if hasattr(policy, "loss_weight"):
        return None
    times = config.policy.delta_timestamps(dataset.fps)
    # At the ends of episodes every other time than the frame's own lies outside of them.
    padded = [f"{name}_is_pad" for name, deltas in times.items() if any(deltas)]
    if not padded:
        return None
    return (
        f"{type(policy).__name__} does not have loss_weight(batch), so every sample counts alike: "
        f"a mean over the entries that {', '.join(padded)} leaves would depend on how a batch is "
        "split over ranks and micro-batches. Return their number from loss_weight (in a loop of "
        "your own: parallel_engine.Loss), or the number of samples if the mean is over all entries"
    )


def build_datasets(
    config: TrainConfig, metadata: Metadata | None = None
) -> tuple[LeRobotDataset, LeRobotDataset | None]:
    """What the run trains on and what it holds out, both normalized by the same statistics.

    With `dataset.stats = "data"` they are those of the first alone; "file" has them of all
    episodes, held-out ones included.

    Raises:
        ConfigError: the folder is not a dataset, or does not have the episodes.
    """
    if metadata is None:
        metadata = read_metadata(config.dataset.folder, config.dataset.rename)
    episodes = [episode.number for episode in metadata.episodes]
    split = split_episodes(episodes, config.dataset, config.eval)
    if not split.held_out:
        return LeRobotDataset.from_config(config.dataset, config.policy, metadata), None
    trained = dataclasses.replace(config.dataset, episodes=split.trained)
    dataset = LeRobotDataset.from_config(trained, config.policy, metadata, split.held_out)
    return dataset, dataset.of_episodes(split.held_out)


def _augmented(config: TrainConfig, dataset: LeRobotDataset) -> Dataset[Batch]:
    """What is trained on, with its pictures changed at random where the config asks for it."""
    transforms = config.dataset.image_transforms
    return Augmented(dataset, transforms, config.seed) if transforms.enable else dataset


def _held_out(
    config: TrainConfig,
    topology: Topology,
    rank: int,
    dataset: LeRobotDataset | None,
    load: Callable[..., DataLoader[Batch]],
) -> HeldOut | None:
    if dataset is None:
        return None
    sampler = HeldOutSampler(
        num_samples=len(dataset),
        batch_size=config.batch_size,
        dp_rank=topology.dp_rank(rank),
        dp_world_size=topology.dp_world_size,
        max_samples=config.eval.max_samples,
    )
    return HeldOut(load(dataset, sampler), sampler.num_counted)


def policy_loss(
    model: nn.Module, batch: Batch, *, preprocessor: Preprocessor
) -> tuple[Loss, dict[str, Tensor]]:
    """The policy's loss on a batch of the dataset, weighted so that any split of it adds up.

    A policy that states no `loss_weight` counts every sample alike. Metrics have the names of
    `Row.name_of`.
    """
    batch, policy = preprocessor(batch), unwrap(model)
    loss, metrics = read_answer(model(batch), type(policy).__name__)
    # From the bare policy: a wrapper of DDP does not show its methods.
    weigh = getattr(policy, "loss_weight", None)
    weight = weigh(batch) if weigh is not None else torch.tensor(len(next(iter(batch.values()))))
    weight = weight.float()  # where it is: a count on the host need not wait for the device
    named = {Row.name_of(name): value for name, value in metrics.items()}
    # The policy returns a mean, and totals add up over micro-batches and ranks.
    return Loss(total=loss * weight, weight=weight), named


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """The optimizer over every trainable parameter, in one group."""
    # Frozen ones are never updated: the optimizer holds exactly the trainable parameters.
    parameters = [p for p in model.parameters() if p.requires_grad]
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.type == "sgd":
        return torch.optim.SGD(parameters, momentum=config.betas[0], **common)
    kind = torch.optim.AdamW if config.type == "adamw" else torch.optim.Adam
    return kind(parameters, betas=config.betas, eps=config.eps, **common)


def build_scheduler(config: TrainConfig, optimizer: Optimizer) -> LambdaLR:
    """Learning rate as a function of updates alone: the same curve on any number of ranks."""
    return LambdaLR(optimizer, partial(config.scheduler.factor, total_steps=config.steps))


def seed_rank(seed: int, rank: int) -> None:
    """Give this rank its own streams of python's, numpy's and torch's random numbers."""
    # Hashed: seed + rank would give rank 1 of seed 0 the stream of rank 0 of seed 1.
    digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")  # numpy takes 32 bits
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _files_of(preprocessor: Preprocessor) -> dict[str, bytes]:
    # Through a folder, since the preprocessor knows how to write files; the saver wants their
    # bytes.
    with tempfile.TemporaryDirectory() as folder:
        preprocessor.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
