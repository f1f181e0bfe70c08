"""Degrees to topology: every decision, and every refusal with the flag that mends it."""

import pytest

from parallel_config import (
    ConfigError,
    ContextParallelConfig,
    Kind,
    ParallelismConfig,
    Topology,
)


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ({}, 1, (1, 1, Kind.SINGLE)),
        ({}, 4, (4, 1, Kind.DDP)),
        ({"dp_replicate": 4}, 4, (4, 1, Kind.DDP)),
        ({"dp_shard": 4}, 4, (1, 4, Kind.FSDP)),
        ({"dp_shard": -1}, 4, (1, 4, Kind.FSDP)),
        ({"dp_shard": -1}, 1, (1, 1, Kind.SINGLE)),
        ({"dp_shard": -1}, 3, (1, 3, Kind.FSDP)),
        ({"dp_replicate": 2, "dp_shard": -1}, 4, (2, 2, Kind.HSDP)),
        ({"dp_replicate": 2, "dp_shard": -1}, 2, (2, 1, Kind.DDP)),
        ({"dp_replicate": -1, "dp_shard": 2}, 8, (4, 2, Kind.HSDP)),
        ({"dp_replicate": 2, "dp_shard": 2}, 4, (2, 2, Kind.HSDP)),
    ],
)
def test_degrees_decide_the_kind(degrees, world_size, expected):
    topology = ParallelismConfig(**degrees).resolve(world_size)
    assert (topology.dp_replicate, topology.dp_shard, topology.kind) == expected


def test_resolve_leaves_the_config_alone():
    config = ParallelismConfig(dp_shard=-1)
    config.resolve(8)
    assert config == ParallelismConfig(dp_shard=-1)


@pytest.mark.parametrize(
    ("degrees", "world_size", "text"),
    [
        (
            {"dp_replicate": 2, "dp_shard": 3},
            8,
            "parallelism.dp_replicate = 2 x parallelism.dp_shard = 3 makes 6, but this launch has "
            "8 ranks. Use --parallelism.dp_shard 4 or -1 (ParallelismConfig.dp_shard), or "
            "launch 6 processes.",
        ),
        (
            {"dp_shard": 2},
            1,
            "parallelism.dp_replicate = 1 x parallelism.dp_shard = 2 makes 2, but this launch has "
            "1 rank. Use --parallelism.dp_replicate 1 (ParallelismConfig.dp_replicate) and "
            "--parallelism.dp_shard -1 (ParallelismConfig.dp_shard), or launch 2 "
            "processes.",
        ),
        (
            {"dp_replicate": 2, "dp_shard": -1},
            3,
            "parallelism.dp_replicate = 2 does not divide the 3 ranks of this launch, so "
            "parallelism.dp_shard = -1 does not have a whole value. Use "
            "--parallelism.dp_replicate 1 or 3 (ParallelismConfig.dp_replicate), or launch a "
            "multiple of 2 processes.",
        ),
    ],
)
def test_degrees_that_do_not_fit(degrees, world_size, text):
    with pytest.raises(ConfigError) as caught:
        ParallelismConfig(**degrees).resolve(world_size)
    assert str(caught.value) == text


@pytest.mark.parametrize("degrees", [{"dp_shard": 0}, {"dp_shard": -2}, {"dp_replicate": 0}])
def test_degrees_out_of_range(degrees):
    with pytest.raises(ConfigError, match=r"but it must be at least 1, or -1"):
        ParallelismConfig(**degrees)


def test_only_one_degree_fills():
    with pytest.raises(ConfigError, match="only one degree can take the remaining ranks"):
        ParallelismConfig(dp_replicate=-1, dp_shard=-1)


@pytest.mark.parametrize("name", ["ring_degree", "ulysses_degree"])
def test_context_parallelism_is_reserved(name):
    with pytest.raises(ConfigError, match=f"parallelism.context_parallel.{name} = 2"):
        ContextParallelConfig(**{name: 2})


@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (512, 1), (1, 512), (64, 8), (3, 5)])
def test_every_rank_reads_its_own_slice_of_the_global_batch(replicate, shard):
    topology = Topology(dp_replicate=replicate, dp_shard=shard)
    assert topology.world_size == replicate * shard
    slices = [topology.dp_rank(rank) for rank in range(topology.world_size)]
    assert sorted(slices) == list(range(topology.dp_world_size))


def test_a_rank_outside_of_the_topology_is_refused():
    with pytest.raises(ValueError, match="rank 4 is not among the 4 of hsdp"):
        Topology(dp_replicate=2, dp_shard=2).dp_rank(4)
