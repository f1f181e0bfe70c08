"""Metrics that are there on some ranks and in some micro-batches: never mixed up, never a hang."""

import pytest
import torch
from torch import nn

from parallel_config import AcceleratorConfig, GradientAccumulationConfig, ParallelismConfig
from parallel_engine import Engine, Loss, evaluate_loss
from parallel_engine.metrics import MetricNames
from parallel_testing.ranks import run_ranks

LAYOUTS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"dp_shard": -1}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
# By update, then by micro-batch of the whole launch: those of rank 0 come first.
UPDATES = [
    [{"a": 1.0, "b": 2.0}, {"a": 3.0}, {"a": 5.0, "c": 7.0}, {"c": 9.0}],
    [{"a": 1.0, "z": 2.0}, {}, {"a": 5.0, "b": 7.0}, {"b": 9.0}],  # as many names, but others
    [{}, {}, {}, {"new": 4.0}],
    [{"b": 1.0}, {"b": 1.0}, {"b": 1.0}, {"b": 1.0}],
    [{}, {}, {}, {}],
]
MEANS = [
    {"a": 3.0, "b": 2.0, "c": 8.0},
    {"a": 3.0, "b": 8.0, "z": 2.0},
    {"new": 4.0},
    {"b": 1.0},
    {},
]


class Tiny(nn.Module):
    _fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x).square().mean()


def loss_fn(model, batch):
    metrics = {name: torch.tensor(value) for name, value in batch["metrics"].items()}
    return model(batch["x"]), metrics


def mine(micro_batches, engine):
    """The part of this rank in the micro-batches of the launch."""
    each = len(micro_batches) // engine.topology.world_size
    part = micro_batches[engine.rank * each :][:each]
    return [{"x": torch.ones(1, 2), "metrics": metrics} for metrics in part]


def started(degrees, accumulation):
    torch.manual_seed(0)
    model = Tiny()
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(
            gradient_accumulation=GradientAccumulationConfig(steps=accumulation)
        ),
        device="cpu",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return engine, *engine.prepare(model, optimizer, None, None)[:2]


def trained(degrees, world):
    engine, model, optimizer = started(degrees, 4 // world)
    return [
        dict(engine.step(model, optimizer, None, mine(update, engine), loss_fn).metrics)
        for update in UPDATES
    ]


def evaluated(degrees, world):
    """The first batch counts twice as much as the others; the last one counts nothing."""
    engine, model, _ = started(degrees, 1)

    def weighted(model, batch):
        loss, metrics = loss_fn(model, batch)
        weight = torch.tensor(2.0 if batch["metrics"].get("b") == 2.0 else 1.0)
        return Loss(loss * weight, weight), metrics

    padding = {"x": torch.ones(1, 2), "metrics": {"a": 100.0, "padding": 1.0}}
    batches = mine(UPDATES[0], engine)
    report = evaluate_loss(engine, model, [*batches, padding], weighted, num_counted=len(batches))
    return dict(report.metrics)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_metric_is_the_mean_of_the_micro_batches_that_gave_it(layout):
    world, degrees = LAYOUTS[layout]
    for found in run_ranks(trained, world, degrees, world):
        assert found == MEANS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluations_weigh_it_by_the_batches_that_gave_it(layout):
    world, degrees = LAYOUTS[layout]
    for found in run_ranks(evaluated, world, degrees, world):
        assert found == pytest.approx({"a": (2 * 1.0 + 3.0 + 5.0) / 4, "b": 2.0, "c": 8.0})


def exchanges():
    """Collectives of an update: the first with new names, and one with known names."""
    import torch.distributed as dist

    names, calls = MetricNames(), []
    reduce, gather = dist.all_reduce, dist.all_gather_object
    dist.all_reduce = lambda vector: (calls.append(len(vector)), reduce(vector))
    dist.all_gather_object = lambda *args: (calls.append("names"), gather(*args))
    for _ in range(2):
        found = names.reduce([1.0], {"loss": (3.0, 1.0), f"of {dist.get_rank()}": (1.0, 1.0)})
        calls.append(found)
    return calls


def test_names_travel_once():
    found = [2.0], {"loss": 3.0, "of 0": 1.0, "of 1": 1.0}
    for calls in run_ranks(exchanges, 2):
        assert calls == [2, "names", 6, found, 8, found]
