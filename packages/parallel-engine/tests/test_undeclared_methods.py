"""A method that the model did not declare names its remedy, and the model stays usable."""

import pytest
import torch

from parallel_config import ParallelismConfig
from parallel_engine import Engine
from parallel_testing.models import TinyModel
from parallel_testing.ranks import run_ranks


class Undeclared(TinyModel):
    """Has a method that no `_fsdp_forward_methods` names."""

    def undeclared(self, x):
        return TinyModel.forward(self, x)


def prepared(degrees, config=None, build=Undeclared, **options):
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


def losses(degrees, config=None, build=Undeclared):
    engine, model, optimizer = prepared(degrees, config, build)
    x = batch_of(engine)
    return [engine.step(model, optimizer, None, [x], mean_square).loss for _ in range(3)]


def calls_an_undeclared_method():
    """(losses without the call, losses after it) of a sharded model."""
    wanted = losses({"dp_shard": -1})
    engine, model, optimizer = prepared({"dp_shard": -1})
    x = batch_of(engine)
    refused = pytest.raises(RuntimeError, match=r"Undeclared\._fsdp_forward_methods")
    with refused, engine.micro_batch(model, 0, 1):
        model.undeclared(x)
    found = [engine.step(model, optimizer, None, [x], mean_square).loss for _ in range(3)]
    return wanted, found


def calls_an_undeclared_method_under_ddp():
    wanted = losses({})
    engine, model, optimizer = prepared({})
    x = batch_of(engine)
    refused = pytest.raises(AttributeError, match=r'_fsdp_forward_methods = \("undeclared",\)')
    with refused, engine.micro_batch(model, 0, 1):
        model.undeclared(x)
    unknown = pytest.raises(AttributeError, match="has no attribute 'unknown'")
    with unknown, engine.micro_batch(model, 0, 1):
        model.unknown(x)
    return wanted, [engine.step(model, optimizer, None, [x], mean_square).loss for _ in range(3)]


@pytest.mark.parametrize(
    "calls",
    [calls_an_undeclared_method, calls_an_undeclared_method_under_ddp],
    ids=["fsdp", "ddp"],
)
def test_an_undeclared_method_names_the_remedy_and_leaves_the_model_usable(calls):
    for wanted, found in run_ranks(calls, 2, init=False):
        assert found == wanted
