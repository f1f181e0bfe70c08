"""Weights go from rank to rank: what fails on one, and what takes long on one, is known to all."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from parallel_ckpt import CheckpointError, CheckpointSaver, RunFolder, read_start
from parallel_ckpt import ranks as ckpt_ranks
from parallel_ckpt.formats.hashing import HashingWriter
from parallel_ckpt.save import safetensors
from parallel_config import CheckpointConfig, Topology
from parallel_testing.ranks import rank_outcomes, run_ranks
from small_runs import quiet


def model_on_two(dim: int = 0) -> nn.Module:
    """Two sharded layers; along `dim` 1 the main rank puts each weight together."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, shard_placement_fn=None if dim == 0 else _by_columns)
    return model


def _by_columns(parameter: nn.Parameter) -> object:
    from torch.distributed.tensor import Shard

    return Shard(parameter.ndim - 1)


def fail_on(rank: int, at: str, patch: pytest.MonkeyPatch) -> None:
    """A real function of the save raises what is not an OSError, on one rank, at its third call."""
    owner, name = {"write": (HashingWriter, "write"), "read": (safetensors, "as_bytes")}[at]
    whole, calls = getattr(owner, name), []

    def failing(*args: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("made to fail")
        return whole(*args)

    if dist.get_rank() == rank:
        patch.setattr(owner, name, failing)


def saves_around_an_error(root: Path, rank: int, at: str, dim: int) -> str:
    """What this rank is told of a save in which one rank fails; a save after it must succeed."""
    model = model_on_two(dim)
    with CheckpointSaver(
        root, topology=Topology(dp_shard=2), on_note=quiet, deadline_s=20
    ) as saver:
        with pytest.MonkeyPatch.context() as patch:
            fail_on(rank, at, patch)
            with pytest.raises(CheckpointError) as caught:
                saver.save(step=1, samples_seen=1, model=model)
        saver.save(step=2, samples_seen=2, model=model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rank", "at", "dim"), [(0, "write", 0), (0, "read", 1), (1, "read", 0), (1, "read", 1)]
)
def test_an_error_of_any_class_on_one_rank_is_the_error_of_all(
    rank: int, at: str, dim: int, tmp_path: Path
) -> None:
    told, also_told = run_ranks(saves_around_an_error, 2, tmp_path, rank, at, dim)
    assert told == also_told == f"rank {rank} failed: ValueError: made to fail"
    assert RunFolder(tmp_path).committed_steps() == [2]
    read_start(tmp_path, topology=Topology(dp_shard=2))


def free_weights_with_an_error(folder: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        fail_on(1, "read", patch)
        with pytest.raises(CheckpointError, match="rank 1"):
            safetensors.save_weights(model_on_two(), folder)
    return sorted(path.name for path in folder.iterdir())


def test_no_file_with_zeros_in_place_of_weights_is_left(tmp_path: Path) -> None:
    assert run_ranks(free_weights_with_an_error, 2, tmp_path / "weights")[0] == []


def saved_with_one_slow_or_dead(root: Path, deadline_s: float, how: str) -> str:
    """Rank 1 sends its first box after three seconds or never; forming a group may take one."""
    dist.barrier()
    model = model_on_two()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt_ranks, "ENTRY_S", 1.0)
        saver = CheckpointSaver(
            root, topology=Topology(dp_shard=2), on_note=quiet, deadline_s=deadline_s
        )
    whole = safetensors.as_bytes

    def late(tensor: torch.Tensor) -> torch.Tensor:
        if how == "dead":
            os._exit(7)
        time.sleep(3)
        return whole(tensor)

    if dist.get_rank() == 1:
        safetensors.as_bytes = late
    try:
        saver.save(step=1, samples_seen=1, model=model)
    except CheckpointError as error:
        # The test's own ranks meet at their end, where a dead one fails the other once more.
        (root / f"told-{dist.get_rank()}").write_text(str(error))
        return str(error)
    saver.close()
    return "saved"


def test_a_transfer_has_the_deadline_that_the_caller_set(tmp_path: Path) -> None:
    told = run_ranks(saved_with_one_slow_or_dead, 2, tmp_path / "long", 60.0, "slow")
    assert told == ["saved", "saved"]
    told = run_ranks(saved_with_one_slow_or_dead, 2, tmp_path / "short", 1.5, "slow")
    assert told[0] == (
        "rank 0 has waited 1.5 s for another rank, which is stuck or slow. "
        "Use CheckpointSaver(deadline_s=...) if it needs longer."
    )
    assert told[1].startswith("rank 1 has lost another rank")


def test_a_rank_that_ends_is_told_to_the_others(tmp_path: Path) -> None:
    _, second = rank_outcomes(saved_with_one_slow_or_dead, 2, tmp_path, 60.0, "dead")
    assert second.exit_code == 7
    assert (tmp_path / "told-0").read_text() == (
        "rank 0 has lost another rank. It ended while the ranks worked on a checkpoint. "
        "The error of that rank says why."
    )


def destroy_during_a_save(root: Path) -> str:
    model = model_on_two()
    saver = CheckpointSaver(
        root,
        topology=Topology(dp_shard=2),
        on_note=quiet,
        config=CheckpointConfig(async_save=True),
        deadline_s=20,
    )
    destroyed = threading.Event()
    whole = safetensors.hashed_file

    def held_up(path: Path) -> object:
        destroyed.wait()
        return whole(path)

    safetensors.hashed_file = held_up
    saver.save(step=1, samples_seen=1, model=model)
    # The collective before the file is over on every rank once nothing is left to meet for.
    time.sleep(2)
    dist.destroy_process_group()
    destroyed.set()
    try:
        saver.close()
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_group_that_is_destroyed_during_a_save_is_named(tmp_path: Path) -> None:
    told = run_ranks(destroy_during_a_save, 2, tmp_path)
    assert told[0] == (
        "process group was destroyed while the ranks worked on a checkpoint. "
        "Call CheckpointSaver.wait or close before destroy_process_group."
    )
    assert told[1] != "saved"
