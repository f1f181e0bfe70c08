"""A model that is prepared without an optimizer: sharded inference and evaluation."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel_config import AcceleratorConfig, ConfigError, ParallelismConfig
from parallel_engine import Engine, Loss, evaluate_loss, initialize, parameters_on_meta
from parallel_testing.ranks import run_ranks

ROWS = torch.arange(32.0).reshape(8, 4) / 32


class Model(nn.Module):
    _fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def loss_fn(model, batch):
    errors = model(batch).square()
    return Loss(errors.sum(), torch.tensor(float(len(batch))))


def evaluated(degrees, is_frozen, on_meta, precision):
    torch.manual_seed(0)
    if on_meta:
        with parameters_on_meta():
            model = Model()
    else:
        model = Model()
    model.requires_grad_(not is_frozen)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(mixed_precision=precision),
        device="cpu",
    )

    def fill(model):
        initialize(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)

    model, optimizer, scheduler, _ = engine.prepare(
        model, None, None, None, fill=fill if on_meta else None
    )
    assert (optimizer, scheduler) == (None, None)
    assert not isinstance(model, DistributedDataParallel)
    parameters = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in parameters) == engine.topology.is_sharded
    rows = ROWS.chunk(engine.topology.world_size)[engine.rank]
    with pytest.raises(RuntimeError, match="this one was prepared for evaluation alone"):
        engine.step(model, None, None, [rows], loss_fn)
    return [evaluate_loss(engine, model, [rows], loss_fn).loss for _ in range(2)]


def every(degrees):
    cases = [(f, m, p) for f in (False, True) for m in (False, True) for p in ("no", "bf16")]
    return [evaluated(degrees, *case) for case in cases]


def test_evaluation_needs_no_optimizer_on_any_kind():
    (wanted,) = run_ranks(every, 1, {}, init=False)
    for degrees in ({}, {"dp_shard": 2}):
        for found in run_ranks(every, 2, degrees, init=False):
            for losses, alone in zip(found, wanted, strict=True):
                assert losses == pytest.approx(alone, rel=1e-5)


def test_a_schedule_without_an_optimizer_is_refused():
    with pytest.raises(ConfigError, match="scheduler is a function, but there is no optimizer"):
        Engine(device="cpu").prepare(Model(), None, lambda optimizer: None, None)


class Normed(nn.Module):
    _fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 1), nn.BatchNorm1d(1)
        nn.init.constant_(self.body.weight, 0.25)
        nn.init.zeros_(self.body.bias)

    def forward(self, x):
        return self.norm(self.body(x))


def evaluated_with_statistics_per_rank(degrees):
    model = Normed()
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")
    model, *_ = engine.prepare(model, None, None, None)
    mean = next(buffer for name, buffer in model.named_buffers() if name.endswith("running_mean"))
    mean.fill_(0.5 + engine.rank)
    rows = ROWS.chunk(engine.topology.world_size)[engine.rank]
    return evaluate_loss(engine, model, [rows], loss_fn).loss, mean.item()


def test_all_ranks_evaluate_with_the_main_ranks_statistics_and_keep_their_own():
    ((wanted, _),) = run_ranks(evaluated_with_statistics_per_rank, 1, {}, init=False)
    for degrees in ({}, {"dp_shard": 2}):
        found = run_ranks(evaluated_with_statistics_per_rank, 2, degrees, init=False)
        assert [loss for loss, _ in found] == pytest.approx([wanted, wanted], rel=1e-5)
        assert [mean for _, mean in found] == [0.5, 1.5]
