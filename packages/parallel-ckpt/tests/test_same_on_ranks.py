"""What is one and what is per rank: buffers come from one rank, and other values must be alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallel_ckpt import CheckpointError, CheckpointSaver, restore
from parallel_ckpt.state.shards import Shard, owners
from parallel_config import CheckpointConfig, CheckpointFormat, Topology
from parallel_testing.ranks import run_ranks

CASES = [
    (form, kind)
    for form in (CheckpointFormat.DCP, CheckpointFormat.SAFETENSORS_DCP)
    for kind in ("ddp", "fsdp")
]


def with_statistics() -> nn.Module:
    """Batch statistics, a counter that is a plain 0-dim buffer, and one that is not saved."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("counter", torch.zeros(()))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    return model


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = with_statistics()
    if kind == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train_apart(model: nn.Module) -> dict[str, torch.Tensor]:
    """Two updates on data of this rank's own; its buffers."""
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
        model(torch.randn(8, 4, generator=generator)).sum().backward()
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(bare, nn.Module)
    bare.counter.fill_(dist.get_rank())  # type: ignore[operator]
    bare.scratch.fill_(dist.get_rank())  # type: ignore[operator]
    return {name: buffer.clone() for name, buffer in bare.named_buffers() if name != "scratch"}


def save_twice_and_restore(root: Path) -> list[tuple[dict[str, Any], dict[str, Any], list[str]]]:
    found = []
    for number, (form, kind) in enumerate(CASES):
        model, notes = wrapped(kind), []
        own = train_apart(model)
        size = dist.get_world_size()
        topology = Topology(dp_replicate=size) if kind == "ddp" else Topology(dp_shard=size)
        with CheckpointSaver(
            root / str(number),
            topology=topology,
            config=CheckpointConfig(async_save=number == 0),
            checkpoint_format=form,
            on_note=notes.append,
        ) as saver:
            path = saver.save(step=1, samples_seen=0, model=model)
            saver.wait()
            saver.save(step=2, samples_seen=0, model=model)
        fresh = with_statistics()
        restore(path, fresh)
        stored = {name: b for name, b in fresh.named_buffers() if name != "scratch"}
        found.append((own, stored, notes))
    return found


def test_all_buffers_of_a_checkpoint_come_from_the_main_rank(tmp_path: Path) -> None:
    ranks = run_ranks(save_twice_and_restore, 2, tmp_path)
    for of_main, of_other in zip(*ranks, strict=True):
        own, stored, notes = of_main
        assert any(not torch.equal(own[name], of_other[0][name]) for name in own)
        assert all(torch.equal(own[name], stored[name]) for name in own)
        (note,) = notes  # said once for two saves, on the main rank
        assert "buffers differ between ranks: 1.running_mean and 4 more" in note
        assert "SyncBatchNorm" in note
        assert not of_other[2]


def save_alike(root: Path) -> list[str]:
    model, notes = wrapped("ddp"), []
    topology = Topology(dp_replicate=dist.get_world_size())
    with CheckpointSaver(root, topology=topology, on_note=notes.append) as saver:
        saver.save(step=1, samples_seen=0, model=model)
    return notes


def test_nothing_is_said_of_buffers_that_are_alike(tmp_path: Path) -> None:
    assert run_ranks(save_alike, 2, tmp_path) == [[], []]


def refusals(root: Path) -> list[str]:
    """What each wrong save raises; the last one, with nothing wrong, must succeed."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    same: dict[str, Any] = {"samples_seen": 8, "data_state": {"at": 1}}
    raised = []

    def attempt(**changed: Any) -> None:
        try:
            saver.save(
                step=1, model=model, optimizer=optimizer, scheduler=scheduler, **(same | changed)
            )
        except CheckpointError as error:
            raised.append(str(error))

    topology = Topology(dp_replicate=dist.get_world_size())
    with CheckpointSaver(root, topology=topology, on_note=lambda note: None) as saver:
        attempt(samples_seen=8 + rank)
        attempt(data_state={"at": rank})
        attempt(data_state=None if rank else {"at": 1}, samples_seen=8 + rank)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        attempt()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.param_groups[0]["betas"] = (0.9, 0.99 + rank / 1000)
        attempt()
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        optimizer.param_groups[0]["fused"] = bool(rank)  # says how, not what
        attempt()
        scheduler.best = float(rank)  # type: ignore[assignment]
        attempt()
    return raised


def test_values_that_differ_between_ranks_are_refused_by_name(tmp_path: Path) -> None:
    first, second = run_ranks(refusals, 2, tmp_path)
    assert first == second
    names = ["samples_seen", "data_state", "data_state, samples_seen", "optimizer.lr"]
    names += ["optimizer.betas", "scheduler"]
    assert len(first) == len(names)
    for name, error in zip(names, first, strict=True):
        assert error.startswith(f"{name} of ranks [1] differs from that of rank 0"), error


@pytest.mark.parametrize("spread", [True, False])
def test_buffers_are_the_lowest_holders(spread: bool) -> None:
    """Also where they are replicated over some ranks alone, as a DTensor on HSDP is."""
    shards = {
        f"{kind}{i}": Shard(
            torch.zeros(4), (4,), (0,), holders=(1, 3) if i % 2 else (), is_buffer=kind == "b"
        )
        for kind in "bp"
        for i in range(8)
    }
    found = owners(shards, 4, spread=spread)
    assert {found[f"b{i}"] for i in range(0, 8, 2)} == {0}
    assert {found[f"b{i}"] for i in range(1, 8, 2)} == {1}
    assert (len({found[f"p{i}"] for i in range(8)}) > 2) == spread
