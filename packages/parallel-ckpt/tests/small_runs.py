"""Small models and savers that several files of this suite use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_ckpt import (
    CheckpointSaver,
    Manifest,
    StepFolder,
    read_manifest,
    resolve_checkpoint,
)
from parallel_ckpt.formats.hashing import hash_bytes
from parallel_ckpt.store.manifest import signed_text
from parallel_config import CheckpointConfig, Topology

ONE = Topology()
NOTES: list[str] = []


def saver_of(
    root: Path,
    *,
    resumed_from: Path | None = None,
    on_note: Callable[[str], None] = NOTES.append,
    **config: Any,
) -> CheckpointSaver:
    return CheckpointSaver(
        root,
        topology=ONE,
        config=CheckpointConfig(**config),
        on_note=on_note,
        resumed_from=resumed_from,
    )


def small(lr: float = 0.1, weight_decay: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def build(size: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, sharded where there are ranks, and an optimizer."""
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, size: int = 8
) -> float:
    generator = torch.Generator().manual_seed(number)
    loss = model(torch.randn(4, size, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def quiet(note: str) -> None:
    """Where notes of a saver go."""


def save_two(root: Path) -> Path:
    """A run with checkpoints of steps 1 and 2, and files beside the weights."""
    model, optimizer = small()
    with saver_of(root) as saver:
        for step in (1, 2):
            train(model, optimizer)
            saver.save(
                step=step,
                samples_seen=8 * step,
                model=model,
                optimizer=optimizer,
                train_config='{"schema_version": 1}',
                model_files={"config.json": "{}", "processors/norm.bin": b"\0\1"},
            )
    return root


def change_manifest(checkpoint: Path, **fields: Any) -> None:
    """Change fields of a manifest, with a checksum that fits."""
    path = checkpoint / "manifest.json"
    path.write_text(signed_text(json.loads(path.read_text()) | fields))


def change_document(checkpoint: Path, name: str, data: bytes) -> Path:
    """Replace a file of the training state, with checksums that fit; the file."""
    file = checkpoint / "training_state" / name
    file.write_bytes(data)
    records = json.loads((checkpoint / "manifest.json").read_text())["files"]
    for record in records:
        if record["path"] == f"training_state/{name}":
            record |= {"checksum": hash_bytes(data), "size_bytes": len(data)}
    change_manifest(checkpoint, files=records)
    return file


def read_manifest_of(run: Path) -> Manifest:
    """Of the checkpoint that a path means."""
    return read_manifest(StepFolder(resolve_checkpoint(run)))
