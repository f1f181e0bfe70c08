"""Everything of one moment that a checkpoint holds, as one rank sees it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from torch import nn
from torch.optim import Optimizer

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.checked_json import is_count
from parallel_ckpt.layout import (
    DCP,
    PRETRAINED_MODEL,
    TRAIN_CONFIG,
    TRAINING_STATE,
    belongs_to_weights,
)
from parallel_ckpt.state.model import named_tensors, shards_of
from parallel_ckpt.state.optimizer import EXECUTION, OptimizerState, Stateful, class_of, collect
from parallel_ckpt.state.plain_json import dump_json, load_json
from parallel_ckpt.state.rng import RngState
from parallel_ckpt.state.savable import savable
from parallel_ckpt.state.shards import Shard
from parallel_ckpt.store.manifest import is_safe_path


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything of one moment that a checkpoint holds, on this rank."""

    step: int
    samples_seen: int
    weights: Mapping[str, Shard]
    optimizer: Mapping[str, Shard]
    documents: Mapping[str, bytes]
    """Files that exist once, by path in the checkpoint; the same on every rank."""
    values: Mapping[str, bytes]
    """What the checkpoint holds once although each rank has one, by the name that errors use."""
    optimizer_class: str | None
    """What identifies the optimizer; None without one."""
    rng: bytes
    """Random state of this rank, as a safetensors file."""


def take_snapshot(
    *,
    step: SupportsIndex,
    samples_seen: SupportsIndex,
    model: nn.Module,
    optimizer: Optimizer | None,
    scheduler: Stateful | None,
    data_state: object,
    files: Mapping[str, bytes],
) -> Snapshot:
    """Look at model, optimizer and random streams. No collective, and no tensor is copied.

    Raises:
        CheckpointError: something could only be pickled, or has no place in the model, or could
            not be read again, or `step` or `samples_seen` is not a count.
    """
    # One walk over the model: it reshards gathered units, whose parameters are other objects.
    tensors = named_tensors(model)
    at, seen = count(step, "step"), count(samples_seen, "samples_seen")
    state = OptimizerState({}, {"groups": [], "state": {}, "scaler": None})
    if optimizer is not None:
        parameters = (item for item in tensors.items() if isinstance(item[1], nn.Parameter))
        state = collect({tensor: name for name, tensor in parameters}, optimizer)
    facts = {"step": at, "samples_seen": seen, "seed": torch.initial_seed()}
    scheduler_state = None if scheduler is None else scheduler.state_dict()
    documents = {
        "training_step.json": dump_json(facts, "training_step"),
        "optimizer.json": dump_json(state.index, "optimizer"),
        "scheduler.json": dump_json(scheduler_state, "scheduler"),
        "data.json": dump_json(data_state, "data_state"),
    }
    return Snapshot(
        values=_values(seen, state.index, documents),
        step=at,
        samples_seen=seen,
        weights=savable(shards_of(tensors)),
        optimizer=savable(state.shards),
        documents=dict(files) | {f"{TRAINING_STATE}/{k}": v for k, v in documents.items()},
        optimizer_class=None if optimizer is None else class_of(optimizer),
        rng=safetensors_bytes(dict(RngState.capture().tensors)),
    )


def _values(
    samples_seen: int, index: Mapping[str, Any], documents: Mapping[str, bytes]
) -> dict[str, bytes]:
    groups = [group["hyper"] for group in index["groups"]]
    names = sorted({key for hyper in groups for key in hyper} - EXECUTION)
    hyper = {
        f"optimizer.{name}": dump_json([group.get(name) for group in groups], name)
        for name in names
    }
    return hyper | {
        "samples_seen": str(samples_seen).encode(),
        "data_state": documents["data.json"],
        "scheduler": documents["scheduler.json"],
    }


def with_sequence(documents: Mapping[str, bytes], sequence: int) -> dict[str, bytes]:
    """The documents, where `training_step.json` also says which commit of the run it is.

    Only the main rank knows the number, and only when it commits.
    """
    path = f"{TRAINING_STATE}/training_step.json"
    facts = load_json(documents[path], path) | {"sequence": sequence}
    return dict(documents) | {path: dump_json(facts, path)}


def count(value: SupportsIndex, name: str) -> int:
    """An integer of any library as one of python's.

    Raises:
        CheckpointError: it is not an integer, is negative, or is too large for a manifest.
    """
    number = -1
    with contextlib.suppress(TypeError):
        number = -1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    if not is_count(number):
        raise CheckpointError.of(
            name, f"= {value!r}, but it must be an integer from 0 to 2^62 - 1."
        )
    return number


def checked_files(
    train_config: str | None, model_files: Mapping[str, str | bytes]
) -> dict[str, bytes]:
    """Content of the files beside the weights, by path in the checkpoint.

    Raises:
        CheckpointError: a name leads out of the folder, or is one of ours.
    """
    files: dict[str, bytes] = {}
    given = dict(model_files) | ({} if train_config is None else {TRAIN_CONFIG: train_config})
    for name, content in given.items():
        if not is_safe_path(name) or belongs_to_weights(name) or name.split("/")[0] == DCP:
            raise CheckpointError.of(
                "model_files",
                f"names {name!r}, which is one of our own names, or leads out of the folder.",
            )
        files[f"{PRETRAINED_MODEL}/{name}"] = (
            content.encode() if isinstance(content, str) else bytes(content)
        )
    return files
