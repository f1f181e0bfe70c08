"""Writes the model card of a run: how to use the policy, what it was trained on, how it went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel_ckpt import read_manifest
from parallel_ckpt.layout import TRAIN_CONFIG, StepFolder
from parallel_config import ConfigError, Topology
from parallel_publish import CardInfo
from parallel_train.config import SCHEMA, TrainConfig, read_config
from parallel_train.metrics.sinks import COSTS
from parallel_train.policies.factory import policy_class
from parallel_train.policies.registry import POLICIES
from parallel_train.run.adapt import global_batch
from parallel_train.run.folder import RunFiles

_NO_METRICS = ("step", "grad_norm", "lr", "samples_seen", "samples_per_s", "skipped", *COSTS)


def describe_run(
    config: TrainConfig,
    *,
    repo_id: str,
    topology: Topology | None = None,
    step: int | None = None,
    metrics: Path | None = None,
) -> CardInfo:
    """The card of a run's config, and of what its `metrics.jsonl` says up to `step`."""
    # my_package.module:MyPolicy is called MyPolicy.
    policy = POLICIES.name_of(config.policy).rpartition(":")[2]
    dataset = config.dataset.name  # the path on this machine is not for the public
    rows = [] if metrics is None else _rows(metrics, step)
    last = rows[-1] if rows else {}
    return CardInfo(
        title=f"{policy} trained on {dataset}",
        summary=f"A `{policy}` model, trained and published with `ptrain` (parallel-train).",
        usage=_usage(config, repo_id),
        tags=("robotics", policy),
        pipeline_tag="robotics",
        datasets=(dataset,),
        facts={
            "optimizer updates": step,
            "samples seen": last.get("samples_seen"),
            "global batch": None if topology is None else global_batch(config, topology),
            "ranks": None if topology is None else topology.describe(),
            "precision": config.accelerator.mixed_precision,
            "optimizer": f"{config.optimizer.type}, learning rate {config.optimizer.lr:g}",
            "seed": config.seed,
        },
        metrics={
            name: value
            for name, value in last.items()
            if name not in _NO_METRICS and isinstance(value, float)
        },
        losses=[(row["step"], row["loss"]) for row in rows],
        train_config=SCHEMA.dump(config),
    )


def describe_checkpoint(checkpoint: Path, repo_id: str) -> CardInfo | None:
    """The card of a committed checkpoint; None where its policy is not installed."""
    step = StepFolder(checkpoint)
    manifest = read_manifest(step)
    try:
        config = read_config(step.train_config, trusted=False).config
    except (ConfigError, OSError):
        return None
    return describe_run(
        config,
        repo_id=repo_id,
        topology=manifest.topology,
        step=manifest.step,
        metrics=RunFiles(checkpoint.parent.parent).metrics,
    )


def describe_folder(folder: Path, repo_id: str) -> CardInfo | None:
    """The card of a folder that `ptrain convert` wrote; None where `ptrain` did not train it."""
    try:
        config = read_config(folder / TRAIN_CONFIG, trusted=False).config
    except (ConfigError, OSError):
        return None
    return describe_run(config, repo_id=repo_id)


def _rows(metrics: Path, step: int | None) -> Sequence[dict[str, Any]]:
    """Rows up to `step`; a line that a crash cut short, or a missing file, is not an error."""
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
            if step is None or row["step"] <= step:
                rows.append({**row, "loss": float(row["loss"])})
        except (ValueError, KeyError, TypeError):
            continue
    return rows


def _usage(config: TrainConfig, repo_id: str) -> str:
    """Code that runs as it stands; empty where nothing is known of the class."""
    try:
        # The code names the method that the class really has.
        cls = policy_class(config.policy)
    except ConfigError:
        return ""
    name = POLICIES.name_of(config.policy)
    # A class by path is imported only if the reader of the card repeats the path.
    trusted = f", policy_type={name!r}" if ":" in name else ""
    head = f"""
from parallel_train.policies.loading import load_policy

policy = load_policy({repo_id!r}{trusted})
batch = policy.example_batch()  # zeros, in the shapes and units of the dataset
"""
    if hasattr(cls, "select_action"):
        return f"{head}action = policy.select_action(batch)  # [1, width], in the dataset's units\n"
    if hasattr(cls, "predict_success"):
        return f"{head}success = policy.predict_success(batch)  # [1], a probability\n"
    return head
