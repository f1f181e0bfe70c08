"""Decides what a resumed run keeps and what it may change, by pure functions over configs.

Two questions are answered here before any model exists: on this many ranks, which degrees and
which accumulation continue the run (`adapt`), and what differs from the config that the checkpoint
was written with (`differences`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parallel_config import (
    ConfigError,
    Kind,
    ParallelismConfig,
    Problem,
    Topology,
)
from parallel_config.codec import to_plain
from parallel_train.config import TrainConfig


@dataclass(frozen=True)
class Adapted:
    """The config as the resumed run uses it."""

    config: TrainConfig
    topology: Topology
    notes: tuple[str, ...] = ()
    """What had to change, one line each."""


def global_batch(config: TrainConfig, topology: Topology) -> int:
    """Samples per optimizer update over all ranks."""
    steps = config.accelerator.gradient_accumulation.steps
    return config.batch_size * topology.dp_world_size * steps


def adapt(
    config: TrainConfig,
    *,
    world_size: int,
    saved_topology: Topology,
    saved_global_batch: int,
    parallelism_given: bool,
    accumulation_given: bool,
    allow_batch_change: bool,
) -> Adapted:
    """Fit a checkpoint's run onto `world_size` ranks, keeping its kind and its global batch.

    With parallelism flags the user's degrees hold. The global batch is kept by changing the
    accumulation, unless the user gave one.

    Raises:
        ConfigError: no degrees fit, or the global batch cannot be kept and
            `--allow_batch_change` was not given.
    """
    parallelism = config.parallelism
    if not parallelism_given:
        parallelism = _refill(saved_topology, world_size)
    topology = parallelism.resolve(world_size)
    notes: list[str] = []
    # Said also where the user asked for it: the log of a run names every change.
    if topology != saved_topology:
        notes.append(f"topology: {saved_topology.describe()} -> {topology.describe()}")
    config = dataclasses.replace(config, parallelism=_resolved(parallelism, topology))
    if global_batch(config, topology) != saved_global_batch:
        config, note = _keep_batch(
            config, topology, saved_global_batch, accumulation_given, allow_batch_change
        )
        notes.append(note)
    return Adapted(config, topology, tuple(notes))


def resolved_config(config: TrainConfig, topology: Topology) -> TrainConfig:
    """The config with the degrees as decided, so that it reproduces the run alone."""
    return dataclasses.replace(config, parallelism=_resolved(config.parallelism, topology))


def differences(saved: TrainConfig, now: TrainConfig) -> list[str]:
    """One line per field that changed: old value, new value, and what that means."""
    before, after = to_plain(saved), to_plain(now)
    return [
        f"{path}: {_show(old)} -> {_show(new)}{_meaning(path, saved, now)}"
        for path, old, new in _walk(before, after, "")
        if not path.startswith(_SILENT)
    ]


def changed_paths(saved: TrainConfig, now: TrainConfig) -> frozenset[str]:
    """Paths of every field that differs."""
    return frozenset(path for path, _, _ in _walk(to_plain(saved), to_plain(now), ""))


def kept_hyperparameters(changed: frozenset[str]) -> tuple[str, ...]:
    """What the config, rather than the checkpoint, decides after these changes.

    Names as `parallel_ckpt.restore(keep=...)` understands them.
    """
    names = [path.removeprefix("optimizer.") for path in changed if path.startswith("optimizer.")]
    keep = [name for name in names if name in ("lr", "betas", "eps", "weight_decay")]
    if "betas" in keep:
        keep.append("momentum")  # what sgd has instead; the others have none to keep
    if "lr" in keep or "steps" in changed or any(p.startswith("scheduler.") for p in changed):
        keep.append("schedule")
    return tuple(sorted(keep))


_SILENT = ("output_dir", "parallelism.", "accelerator.gradient_accumulation.steps")
_HELD_OUT = (
    "an episode held out only from here on was trained on until this checkpoint, so its eval_loss "
    "is not that of unseen data"
)
_MEANINGS = {
    "optimizer.": "in force from the next update",
    "steps": "the schedule now ends there",
    "scheduler.": "the curve follows the new values from the next update",
    "batch_size": "the data position is kept in samples",
    "seed": "the data order changes from here on",
    "eval.fraction": _HELD_OUT,
    "eval.episodes": _HELD_OUT,
    "dataset.episodes": f"the data position is kept in samples, of the new data; {_HELD_OUT}",
    "dataset.rename": "what the policy reads under which name",
    "dataset.": "the data position is kept in samples, of the new data",
    "policy.": "in force, if the saved weights fit",
}


def _meaning(path: str, saved: TrainConfig, now: TrainConfig) -> str:
    text = next((text for start, text in _MEANINGS.items() if path.startswith(start)), "in force")
    if now.optimizer.type == "sgd":
        same_momentum = saved.optimizer.betas[0] == now.optimizer.betas[0]
        if path == "optimizer.eps" or (path == "optimizer.betas" and same_momentum):
            text = "without effect: sgd reads only the first of betas, as its momentum"
    return f" ({text})"


def _walk(before: Any, after: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        # In the order of the fields, with those that only one of the two has.
        for key in {**before, **after}:
            path = f"{prefix}.{key}" if prefix else key
            yield from _walk(before.get(key), after.get(key), path)
    elif before != after:
        yield prefix, before, after


def _show(value: Any) -> str:
    return "none" if value is None else str(value)


def _refill(saved: Topology, world_size: int) -> ParallelismConfig:
    if saved.kind is Kind.FSDP:
        return ParallelismConfig(dp_replicate=1, dp_shard=world_size)
    if saved.kind is Kind.HSDP:
        # HSDP keeps dp_shard, which decides the memory of a rank, and changes the number of copies.
        if world_size % saved.dp_shard:
            raise ConfigError(
                Problem(
                    "parallelism.dp_shard",
                    f"= {saved.dp_shard} of the checkpoint ({saved.describe()}) does not divide "
                    f"the {world_size} ranks of this launch.",
                    "Choose: "
                    + " or ".join(
                        f"--parallelism.dp_replicate {world_size // n} --parallelism.dp_shard {n}"
                        for n in range(1, world_size + 1)
                        if world_size % n == 0
                    )
                    + f", or launch a multiple of {saved.dp_shard} processes.",
                )
            )
        return ParallelismConfig(dp_replicate=world_size // saved.dp_shard, dp_shard=saved.dp_shard)
    return ParallelismConfig(dp_replicate=world_size)


def _resolved(parallelism: ParallelismConfig, topology: Topology) -> ParallelismConfig:
    return dataclasses.replace(
        parallelism, dp_replicate=topology.dp_replicate, dp_shard=topology.dp_shard
    )


def _keep_batch(
    config: TrainConfig,
    topology: Topology,
    wanted: int,
    accumulation_given: bool,
    allow_batch_change: bool,
) -> tuple[TrainConfig, str]:
    per_micro = config.batch_size * topology.dp_world_size
    found = global_batch(config, topology)
    before = config.accelerator.gradient_accumulation.steps
    # batch_size stays, so that a rank needs no more memory: only the number of micro-batches
    # changes.
    if not accumulation_given and wanted % per_micro == 0:
        accumulation = dataclasses.replace(
            config.accelerator.gradient_accumulation, steps=wanted // per_micro
        )
        accelerator = dataclasses.replace(config.accelerator, gradient_accumulation=accumulation)
        note = (
            f"accelerator.gradient_accumulation.steps: {before} -> {accumulation.steps} "
            f"(keeps the global batch of {wanted} samples)"
        )
        return dataclasses.replace(config, accelerator=accelerator), note
    if allow_batch_change:
        return config, f"global batch: {wanted} -> {found} samples (--allow_batch_change)"
    # Each of these keeps the global batch with some accumulation; the largest four are shown.
    fits = [n for n in range(1, wanted + 1) if wanted % (n * topology.dp_world_size) == 0]
    way = (
        f"Use --batch_size {' or '.join(str(n) for n in fits[-4:])}, or --allow_batch_change."
        if fits
        else "Use --allow_batch_change, or launch another number of processes."
    )
    raise ConfigError(
        Problem(
            "batch_size",
            f"= {config.batch_size} x {topology.dp_world_size} ranks x accumulation {before} = "
            f"{found} samples, but the checkpoint's global batch is {wanted}.",
            way,
        )
    )
