"""Loads batches ahead of time, without touching the model's random numbers."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from parallel_train.data.order import GlobalBatchSampler, HeldOutSampler
from parallel_train.data.worker_deaths import remembering


def build_loader(
    dataset: Dataset[Any],
    sampler: GlobalBatchSampler | HeldOutSampler,
    *,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A loader of this rank's micro-batches: endless from the sampler's position on, or held out.

    Nothing is drawn from the global generators: `iter(DataLoader)` takes its seeds from a
    generator of its own, and those of the workers follow from the sampler's seed, position and
    rank. `pin_memory` has an effect only where there is a GPU.
    """
    key = (sampler.seed, sampler.start_samples, sampler.dp_rank)
    generator = torch.Generator()
    generator.manual_seed(_seed(*key))
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        # torch refuses a value here without workers.
        prefetch_factor=prefetch_factor if num_workers else None,
        collate_fn=_collate,
        generator=generator,
        multiprocessing_context=remembering() if num_workers else None,
        pin_memory=pin_memory and torch.cuda.is_available(),
        worker_init_fn=partial(_start_worker, key, _leaving()) if num_workers else None,
    )


def _collate(samples: Any) -> Any:
    """A dataset with `__getitems__` may return a whole batch already."""
    return samples if isinstance(samples, Mapping) else default_collate(samples)


def _leaving() -> Any:
    """A flag in shared memory that is set when this process begins to exit.

    Python then ends its children by SIGTERM and waits for them: a worker that went on ignoring
    the signal would hang the exit.
    """
    flag = multiprocessing.RawValue("b", 0)
    atexit.register(setattr, flag, "value", 1)  # later registered, it runs before Python's own
    return flag


def _start_worker(key: tuple[int, ...], leaving: Any, worker: int) -> None:
    """Seed the worker, and let it ignore signals: they are the training process's to answer.

    SIGTERM counts once that process is leaving. A worker whose parent has died ends by itself.
    """
    # The parent as it is now: a later one means that it has died.
    sys.excepthook = partial(_report, os.getppid())
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0) if leaving.value else None)
    # Workers share the cores with the training process.
    torch.set_num_threads(1)
    seed = _seed(*key, worker)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes 32 bits
    torch.manual_seed(seed)


def _report(
    parent: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an error, unless it only says that the training process is gone.

    The thread that hands tensors over meets a dead process in the middle of a handshake. The
    launcher reports that death; a worker's traceback would hide the report.
    """
    deadline = time.monotonic() + 1.0
    while isinstance(error, OSError | EOFError) and time.monotonic() < deadline:
        if os.getppid() != parent:  # its sockets are closed a moment before its children move on
            os._exit(1)
        time.sleep(0.01)
    sys.__excepthook__(kind, error, trace)


def _seed(*key: int) -> int:
    """One number below 2**63 from several."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
