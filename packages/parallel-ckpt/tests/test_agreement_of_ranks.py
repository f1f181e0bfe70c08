"""Ranks that differ are told so, all alike; each rank has a random stream of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    read_start,
)
from parallel_config import Topology
from parallel_testing.ranks import run_ranks
from small_runs import quiet, small


def streams_twice(run: Path, topology: Topology) -> list[float]:
    """What this rank draws first after a resume, and after another resume."""
    drawn = []
    for seed in (77, 78):
        torch.manual_seed(seed)
        start = read_start(run, topology=topology)
        assert bool(start.notes) == (start.manifest.topology != topology)
        start.restore_rng()
        drawn.append(float(torch.rand(())))
    return drawn


def save_and_draw(run: Path) -> list[float]:
    """What this rank draws after a save, and then after each of two resumes."""
    topology = Topology(dp_replicate=dist.get_world_size())
    torch.manual_seed(dist.get_rank())
    model, optimizer = small()
    with CheckpointSaver(run, topology=topology, on_note=quiet) as saver:
        saver.save(step=4, samples_seen=0, model=model, optimizer=optimizer)
    drawn = float(torch.rand(()))
    return [drawn, *streams_twice(run, topology)]


def draw_of_others(other: Path, own: Path) -> tuple[list[float], list[float]]:
    """Streams of a run that was saved on other ranks, and of one that is saved here."""
    return streams_twice(other, Topology(dp_replicate=dist.get_world_size())), save_and_draw(own)


def test_each_rank_has_its_own_stream_again_and_others_get_new_ones(tmp_path: Path) -> None:
    two, three = tmp_path / "two", tmp_path / "three"
    for drawn in run_ranks(save_and_draw, 2, two):
        assert len(set(drawn)) == 1  # the same stream goes on, at every resume
    on_more = run_ranks(draw_of_others, 3, two, three)
    on_fewer = run_ranks(draw_of_others, 2, three, tmp_path / "again")
    for world in (on_more, on_fewer):
        assert all(first == again for (first, again), _ in world)
        assert len({first for (first, _), _ in world}) == len(world)


def refused(root: Path) -> list[str]:
    """What this rank is told of a folder of its own, and of a model of its own."""
    rank, topology = dist.get_rank(), Topology(dp_replicate=2)
    told = []
    # Each rank is given its own folder: what an output_dir on a node's own disk amounts to.
    with pytest.raises(CheckpointError) as caught:
        CheckpointSaver(root / str(rank), topology=topology)
    told.append(str(caught.value))
    with CheckpointSaver(root, topology=topology, on_note=quiet) as saver:
        with pytest.raises(CheckpointError) as caught:
            saver.save(step=1, samples_seen=0, model=nn.Linear(3, 2 + rank))
        told.append(str(caught.value))
    return told


def test_ranks_that_see_another_folder_or_hold_other_tensors_are_told(tmp_path: Path) -> None:
    told, also_told = run_ranks(refused, 2, tmp_path)
    assert told == also_told
    assert "is not shared by rank 1" in told[0]
    assert "ranks [1] hold other tensors" in told[1]
