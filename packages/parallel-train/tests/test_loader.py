"""Loaders: the same batches with and without workers, from any position, and no random draws."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_train.data.config import DatasetConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler

STATE = Path(__file__).parent / "data" / "lerobot_v3_state"
# Python 3.12 warns about the fork that starts a loader worker.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def batches(start: int, count: int, num_workers: int, **arguments: Any) -> list[dict[str, Any]]:
    dataset = LeRobotDataset(STATE, {"action": [0.0, 0.1, 0.2]})
    sampler = GlobalBatchSampler(len(dataset), 8, seed=2, start_samples=start)
    loader = build_loader(dataset, sampler, num_workers=num_workers, **arguments)
    iterator = iter(loader)
    found = list(islice(iterator, count))
    del iterator  # ends its workers
    return found


def assert_equal(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_loader_goes_on_with_the_same_batches(num_workers: int) -> None:
    whole = batches(0, 24, num_workers=0)  # 192 samples: the third epoch of 75
    assert whole[0]["action"].shape == (8, 3, 2)
    assert_equal(batches(13 * 8, 11, num_workers), whole[13:])


def test_prefetching_changes_nothing() -> None:
    assert_equal(batches(0, 6, 2, prefetch_factor=5), batches(0, 6, 0))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_models_random_numbers_are_left_alone(num_workers: int) -> None:
    before = torch.get_rng_state()
    batches(0, 3, num_workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_leave_stop_signals_to_the_training_process() -> None:
    dataset = LeRobotDataset(STATE)
    sampler = GlobalBatchSampler(len(dataset), 8)
    iterator: Any = iter(build_loader(dataset, sampler, num_workers=2))
    list(islice(iterator, 2))  # one from each: both have started
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(islice(iterator, 12))) == 12
    assert all(worker.is_alive() for worker in iterator._workers)


class Draws(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset that augments: its samples depend on the worker's generator."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1) + index


def test_workers_that_draw_are_seeded_from_seed_and_position() -> None:
    def draw(seed: int, start: int) -> torch.Tensor:
        sampler = GlobalBatchSampler(64, 4, seed=seed, start_samples=start)
        return torch.cat(list(islice(iter(build_loader(Draws(), sampler, num_workers=2)), 4)))

    assert torch.equal(draw(0, 0), draw(0, 0))
    assert not torch.equal(draw(0, 0) % 1, draw(0, 64) % 1)
    assert not torch.equal(draw(0, 0) % 1, draw(1, 0) % 1)


LEAVES = """
import sys
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler
dataset = LeRobotDataset(sys.argv[1])
iterator = iter(build_loader(dataset, GlobalBatchSampler(len(dataset), 8), num_workers=2))
next(iterator)
"""


def test_a_process_that_still_has_workers_exits() -> None:
    """Its children are ended by SIGTERM, which they ignore until then."""
    command = [sys.executable, "-W", "ignore", "-c", LEAVES, str(STATE)]
    assert subprocess.run(command, timeout=90, check=False).returncode == 0


DIES = """
import os, signal, sys, threading, time
import torch
from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler


class Many(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {name: torch.zeros(64) for name in map(str, range(30))}


iterator = iter(build_loader(Many(), GlobalBatchSampler(1000, 2), num_workers=2))
for _ in range(20):
    next(iterator)
die = lambda: (time.sleep(0.05), os.kill(os.getpid(), signal.SIGKILL))
threading.Thread(target=die).start()
while True:
    next(iterator)
"""


def test_workers_of_a_killed_process_end_without_a_word() -> None:
    """Killed while it receives tensors, so that the workers' side of it breaks."""
    command = [sys.executable, "-W", "ignore", "-c", DIES]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == -signal.SIGKILL
        assert done.stderr == ""  # and it is closed: they have ended


@pytest.mark.parametrize(
    ("asked", "device", "workers"),
    [(None, "cuda", 4), (None, "cpu", 0), (0, "cuda", 0), (2, "cpu", 2)],
)
def test_a_gpu_has_loader_processes_unless_told_otherwise(asked, device, workers):
    assert DatasetConfig(num_workers=asked).workers(device) == workers
