"""The multi-GPU suite: one file of checks, on GPUs or on gloo ranks.

PARALLEL_TEST_DEVICE is cpu (4 gloo ranks) or cuda; PARALLEL_TEST_GPUS says how many GPUs to use.
"""

import os

import pytest
import torch

from parallel_testing.ranks import preload

# Imported once by the ranks' forkserver instead of by every rank anew.
preload("torch._dynamo", "torch.distributed.fsdp", "parallel_engine")

RANKS_ON_CPU = 4


@pytest.fixture(scope="session")
def device():
    """Where the suite runs; it skips, saying so, when the GPUs are not there."""
    name = os.environ.get("PARALLEL_TEST_DEVICE", "cpu")
    if name not in ("cpu", "cuda"):
        pytest.fail(f"PARALLEL_TEST_DEVICE = {name!r}, but it is cpu or cuda")
    if name == "cuda":
        wanted = int(os.environ.get("PARALLEL_TEST_GPUS", "4"))
        found = torch.cuda.device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} CUDA devices, found {found}")
    return name


@pytest.fixture(scope="session")
def world_size(device):
    """Ranks of a distributed run."""
    return int(os.environ.get("PARALLEL_TEST_GPUS", "4")) if device == "cuda" else RANKS_ON_CPU


@pytest.fixture(scope="session")
def layouts(world_size):
    """Degrees of every kind that this many ranks can show."""
    found = {}
    if world_size >= 2:
        found |= {"ddp": {}, "fsdp": {"dp_shard": -1}}
    if world_size >= 4 and world_size % 2 == 0:
        found["hsdp"] = {"dp_replicate": 2, "dp_shard": -1}
    return found
