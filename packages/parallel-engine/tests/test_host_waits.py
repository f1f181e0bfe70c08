"""How often an update makes the host wait for the device, and how often the ranks exchange numbers.

Every tensor is on the CPU here, so each read of a number counts, by the function that reads. That
of the exchange between the hosts (`_summed`) is on the CPU in any run: no device is asked for it.
"""

import contextlib
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_config import (
    AcceleratorConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    ParallelismConfig,
)
from parallel_engine import Engine, Loss
from parallel_testing.ranks import run_ranks

KINDS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"dp_shard": 2}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


class Reads(TorchFunctionMode):
    """Counts the calls that read numbers of a tensor on the host, by name and caller."""

    def __init__(self, counts):
        self.counts = counts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("tolist", "cpu", "numpy"):
            self.counts[f"{name} in {sys._getframe(1).f_code.co_name}"] += 1
        return function(*args, **(kwargs or {}))


class Scalars(TorchDispatchMode):
    """Counts what `item`, `float`, `bool` and comparisons in an `if` end in."""

    def __init__(self, counts):
        self.counts = counts

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(operator):
            self.counts["item"] += 1
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def collectives(counts):
    """Counts the collectives of our own: gradients are float32 here, and our numbers float64."""
    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_object", "broadcast")}

    def counted(name):
        def call(first, *args, **kwargs):
            if name != "all_reduce" or first.dtype == torch.float64:
                counts[name] += 1
            return kept[name](first, *args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, counted(name))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


class Model(nn.Module):
    _fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.body, self.whole = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.whole(self.body(x)) * self.gain


class Rows:
    """Without a length: a rank says in each update whether its window is the last one."""

    def __iter__(self):
        return iter([torch.ones(2, 4)] * 6)


def loss_fn(model, batch):
    errors = model(batch).square()
    return Loss(errors.sum(), torch.tensor(2.0)), {"error": errors.mean(), "rows": 2.0}


def counts_of_updates(degrees):
    """Of the second and the third update: in the first one ranks exchange the metrics' names."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AcceleratorConfig(
        gradient_accumulation=GradientAccumulationConfig(steps=2),
        fsdp=FSDPConfig(ignored_modules=("whole",)),
    )
    engine = Engine(parallelism=ParallelismConfig(**degrees), accelerator=config, device="cpu")
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    found = []
    for window in engine.accumulate(Rows()):
        reads, exchanges = Counter(), Counter()
        with Reads(reads), Scalars(reads), collectives(exchanges):
            report = engine.step(
                model, optimizer, None, window, loss_fn, clip_norm=0.1, stop=lambda: False
            )
        assert report.metrics["rows"] == 2.0
        found.append((dict(reads), dict(exchanges)))
    return found[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_reads_the_device_once_and_ranks_exchange_numbers_twice(kind):
    world_size, degrees = KINDS[kind]
    wanted = {"tolist in _reduce": 1}, {}
    if kind != "single":
        wanted = {**wanted[0], "tolist in _summed": 1}, {"all_reduce": 2}
    for found in run_ranks(counts_of_updates, world_size, degrees, init=False):
        assert found == [wanted, wanted]


def steps_until_asked(degrees):
    """On rank 0 the request comes while the second update runs."""
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    asked = iter([False, True, False])
    reports = [
        engine.step(
            model, optimizer, None, [torch.ones(2, 4)], loss_fn,
            stop=(lambda: next(asked)) if engine.rank == 0 else None,
        )
        for _ in range(3)
    ]  # fmt: skip
    return [report.stop for report in reports]


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp"])
def test_a_request_to_stop_on_one_rank_is_in_the_report_of_every_rank(kind):
    world_size, degrees = KINDS[kind]
    wanted = [[False, True, False]] * world_size
    assert run_ranks(steps_until_asked, world_size, degrees, init=False) == wanted
