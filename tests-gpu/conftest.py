"""The multi-GPU suite: one set of checks, on GPUs or on gloo ranks.

PARALLEL_TEST_DEVICE is cpu (4 gloo ranks) or cuda; PARALLEL_TEST_GPUS says how many GPUs to use.
Missing GPUs are an error unless `--allow-missing` is given. With four GPUs no test may skip: one
run answers every question, or says which one it does not answer.
"""

import os

import pytest
import torch

from parallel_testing.ranks import preload

# Imported once by the ranks' forkserver instead of by every rank anew.
preload(
    "parallel_engine", "parallel_ckpt.save.saver", "parallel_ckpt.load.resume", "parallel_publish"
)

RANKS_ON_CPU = 4
KINDS_NEED = 4
"""Ranks on which every kind can be shown: HSDP has two degrees of two."""


def pytest_addoption(parser):
    parser.addoption(
        "--allow-missing", action="store_true", help="skip where GPUs are missing, and say so"
    )


def pytest_sessionstart(session):
    """A rented node without its GPUs is found before anything is collected."""
    if lack := missing_gpus(session.config):
        raise pytest.UsageError(f"{lack}; --allow-missing skips these tests.")


def missing_gpus(config):
    """What is missing, in words; empty where the suite can run or may skip."""
    name = chosen_device()
    if name not in ("cpu", "cuda"):
        raise pytest.UsageError(f"PARALLEL_TEST_DEVICE = {name!r}, but it must be cpu or cuda.")
    if name == "cpu" or config.getoption("--allow-missing", default=False):
        return ""
    return lack_of_gpus()


def chosen_device():
    return os.environ.get("PARALLEL_TEST_DEVICE", "cpu")


def gpus_wanted():
    return int(os.environ.get("PARALLEL_TEST_GPUS", "4"))


def lack_of_gpus():
    found = torch.cuda.device_count()
    wanted = gpus_wanted()
    return f"{wanted} CUDA devices are needed, {found} were found" if found < wanted else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where every test can run, one that skips has not answered its question: it fails."""
    report = yield
    strict = chosen_device() == "cuda" and gpus_wanted() >= KINDS_NEED and not lack_of_gpus()
    if report.skipped and strict:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped on {gpus_wanted()} GPUs, where every test must run: {reason}"
    return report


@pytest.fixture(scope="session")
def device():
    """Where the suite runs: cpu or cuda."""
    name = chosen_device()
    if name == "cuda" and (lack := lack_of_gpus()):
        pytest.skip(lack)  # reached with --allow-missing alone
    return name


@pytest.fixture(scope="session")
def cuda(device):
    """For tests that mean nothing on the host."""
    if device != "cuda":
        pytest.skip("only a GPU can show it")
    return device


@pytest.fixture(scope="session")
def world_size(device):
    """Ranks of a distributed run."""
    return gpus_wanted() if device == "cuda" else RANKS_ON_CPU


@pytest.fixture(scope="session")
def layouts(world_size):
    """Degrees of every kind that this many ranks can show."""
    found = {}
    if world_size >= 2:
        found |= {"ddp": {}, "fsdp": {"dp_shard": -1}}
    if world_size >= 4 and world_size % 2 == 0:
        found["hsdp"] = {"dp_replicate": 2, "dp_shard": -1}
    return found
