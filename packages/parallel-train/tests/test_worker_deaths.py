"""A loader worker that dies is named: which process, how, and what helps."""

import faulthandler
import os
import signal
import time

import pytest
import torch
from torch.utils.data import Dataset

from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler
from parallel_train.data.worker_deaths import worker_death


class Deadly(Dataset):
    """Samples, of which a batch ends its worker in some way."""

    def __init__(self, way):
        self._way = way

    def __len__(self):
        return 64

    def __getitems__(self, indices):
        if callable(self._way):
            self._way()
        elif self._way is not None:
            faulthandler.disable()  # pytest's: its report would look like a failure
            os.kill(os.getpid(), self._way)
            time.sleep(5)
        return {"pid": torch.tensor([os.getpid()])}


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (signal.SIGKILL, "was ended by SIGKILL: the usual cause is the kernel, because memory "
         "ran out. Use fewer --dataset.num_workers (now 1), or a smaller "
         "--dataset.prefetch_factor or "),
        (signal.SIGBUS, "was ended by SIGBUS: the usual cause is a full shared memory"),
        (signal.SIGABRT, "was ended by SIGABRT: --dataset.num_workers 0 reads in the training"),
        (lambda: os._exit(3), "left with 3: --dataset.num_workers 0 reads in the training process"),
    ],
)  # fmt: skip
def test_the_death_of_a_worker_is_named(way, message):
    sampler = GlobalBatchSampler(
        num_samples=64, batch_size=4, accumulation=1, dp_rank=0, dp_world_size=1, seed=0
    )
    batches = iter(build_loader(Deadly(way), sampler, num_workers=1))
    with pytest.raises((RuntimeError, OSError, EOFError)):
        next(batches)
    assert message in str(worker_death())
    del batches


def test_no_worker_no_death():
    assert worker_death() is None
