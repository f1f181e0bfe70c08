"""An update that must not be made is left out on every rank, before anything moves."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import AcceleratorConfig, DDPConfig, ParallelismConfig
from parallel_engine import (
    Engine,
    EngineError,
    NonFiniteError,
    PeerError,
    UnitOrderError,
    UnusedParametersError,
)
from parallel_testing.models import TinyModel
from parallel_testing.ranks import run_ranks


def prepared(degrees, config=None, build=TinyModel, **options):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees), accelerator=config, device="cpu", **options
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    return engine, model, optimizer


def batch_of(engine):
    return torch.arange(8.0).reshape(2, 4) / 8 + engine.rank


def mean_square(model, x):
    return model(x).square().mean()


def losses(degrees, config=None, build=TinyModel):
    engine, model, optimizer = prepared(degrees, config, build)
    x = batch_of(engine)
    return [engine.step(model, optimizer, None, [x], mean_square).loss for _ in range(3)]


def not_finite_on_rank_1(policy, degrees, value):
    """(weights unchanged, rate unchanged, trains on afterwards)."""
    engine, model, optimizer = prepared(degrees, on_nonfinite=policy)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    scheduler = engine.accelerator.prepare_scheduler(scheduler)
    before = [local(p).clone() for p in model.parameters()]
    good = batch_of(engine)
    factor = value if engine.rank else 1.0

    def bad(m, x):
        return mean_square(m, x) * factor

    if policy == "error":
        with pytest.raises(NonFiniteError):
            engine.step(model, optimizer, scheduler, [good], bad, clip_norm=1.0)
    else:
        assert engine.step(model, optimizer, scheduler, [good], bad, clip_norm=1.0).skipped
        assert engine.num_skipped == 1
        assert all(p.grad is None for p in model.parameters())
    unchanged = all(
        torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True)
    )
    rate = optimizer.param_groups[0]["lr"]
    optimizer.zero_grad()
    after = [engine.step(model, optimizer, scheduler, [good], mean_square).loss for _ in range(3)]
    return unchanged, rate == 0.1, after[2] < after[1] < after[0]


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


DEGREES = {"ddp": {}, "fsdp": {"dp_shard": -1}}
VALUES = {"nan": float("nan"), "inf": float("inf")}
BAD = list(itertools.product(DEGREES, ("error", "skip"), VALUES))


def every_bad_value():
    return {
        (kind, policy, value): not_finite_on_rank_1(policy, DEGREES[kind], VALUES[value])
        for kind, policy, value in BAD
    }


@pytest.fixture(scope="module")
def bad_updates():
    """By rank, then by case; the cases share a launch."""
    return run_ranks(every_bad_value, 2, init=False, timeout_s=200)


@pytest.mark.parametrize("case", BAD, ids="-".join)
def test_what_is_not_finite_on_one_rank_stops_the_update_on_all(bad_updates, case):
    """Before weights, rate and counters move."""
    assert [found[case] for found in bad_updates] == [(True, True, True)] * 2


class Unused(TinyModel):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(4, 2)


def ddp_with_unused():
    """(the error, losses where it is allowed, losses without unused parameters)."""
    engine, model, optimizer = prepared({}, build=Unused)
    with pytest.raises(UnusedParametersError) as caught:
        engine.step(model, optimizer, None, [batch_of(engine)], mean_square)
    allowed = AcceleratorConfig(ddp=DDPConfig(find_unused_parameters=True))
    return str(caught.value), losses({}, allowed, Unused), losses({})


def test_ddp_names_unused_parameters_and_the_flag_that_allows_them():
    for message, allowed, without in run_ranks(ddp_with_unused, 2, init=False):
        assert "extra.weight" in message
        assert "--accelerator.ddp.find_unused_parameters" in message
        assert allowed == without


@pytest.mark.parametrize(
    "error", [NonFiniteError, PeerError, UnitOrderError, UnusedParametersError]
)
def test_every_error_of_an_update_is_an_engine_error(error):
    assert issubclass(error, EngineError)
    assert issubclass(EngineError, RuntimeError)
