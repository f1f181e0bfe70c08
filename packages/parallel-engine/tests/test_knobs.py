"""Settings that change memory, speed or communication do not change the numbers.

The settings of one subject share a launch: starting ranks takes longer than what they do.
"""

import dataclasses
import os
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from parallel_config import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    CompileConfig,
    DDPConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    ParallelismConfig,
)
from parallel_engine import Engine
from parallel_testing.ranks import run_ranks


class Block(nn.Linear):
    pass


class Model(nn.Module):
    """Two blocks, the first of which sees the input itself, and a head in the root unit."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(4, 4), Block(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def prepared(degrees, config=None, build=Model, **options):
    torch.manual_seed(0)
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


def losses(degrees, config=None, build=Model):
    engine, model, optimizer = prepared(degrees, config, build)
    x = batch_of(engine)
    return [engine.step(model, optimizer, None, [x], mean_square).loss for _ in range(3)]


KNOBS = {
    "full": AcceleratorConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="full")),
    "selective": AcceleratorConfig(
        activation_checkpointing=ActivationCheckpointingConfig(mode="selective")
    ),
    "aot_eager": AcceleratorConfig(compile=CompileConfig(enable=True, backend="aot_eager")),
    "cpu_offload": AcceleratorConfig(fsdp=FSDPConfig(cpu_offload=True)),
    "ignored": AcceleratorConfig(fsdp=FSDPConfig(ignored_modules=("head",))),
    "no_reshard": AcceleratorConfig(fsdp=FSDPConfig(reshard_after_forward=False)),
}


def losses_of_knobs():
    """Losses of DDP without any knob, and of a sharded model under each knob."""
    found = {"plain": losses({})}
    for name, config in KNOBS.items():
        found[name] = losses({"dp_shard": -1}, config)
    return found


@pytest.fixture(scope="module")
def found():
    """By rank, then by name."""
    return run_ranks(losses_of_knobs, 2, init=False, timeout_s=200)


@pytest.mark.parametrize("name", KNOBS)
def test_a_knob_does_not_change_the_numbers(found, name):
    plain = found[0]["plain"]
    for ranks in found:
        assert ranks[name] == pytest.approx(plain, rel=1e-5)


DDP_KNOBS = [
    DDPConfig(),
    DDPConfig(find_unused_parameters=True),
    DDPConfig(static_graph=True),
    DDPConfig(bucket_cap_mb=1, gradient_as_bucket_view=False, broadcast_buffers=False),
]


def ddp_knobs_of_all():
    return [losses_of_ddp_knobs(accumulation) for accumulation in (1, 2)]


def losses_of_ddp_knobs(accumulation):
    """Losses and norms of three updates under each knob, and which knobs DDP has."""
    found = []
    steps = GradientAccumulationConfig(steps=accumulation)
    for knobs in DDP_KNOBS:
        config = AcceleratorConfig(ddp=knobs, gradient_accumulation=steps)
        engine, model, optimizer = prepared({}, config)
        window = list(batch_of(engine).chunk(accumulation))
        reports = [engine.step(model, optimizer, None, window, mean_square) for _ in range(3)]
        in_force = (
            model.find_unused_parameters,
            model.static_graph,
            model.gradient_as_bucket_view,
            model.broadcast_buffers,
            model.bucket_bytes_cap >> 20,
        )
        found.append(([(r.loss, r.grad_norm) for r in reports], in_force))
    return found


def test_ddps_knobs_are_in_force_and_do_not_change_the_numbers():
    by_rank = run_ranks(ddp_knobs_of_all, 2, init=False, timeout_s=200)
    for found in [found for accumulations in by_rank for found in accumulations]:
        plain = found[0][0]
        for (numbers, in_force), knobs in zip(found, DDP_KNOBS, strict=True):
            assert [pytest.approx(pair, rel=1e-6) for pair in plain] == numbers
            assert in_force == (
                knobs.find_unused_parameters,
                knobs.static_graph,
                knobs.gradient_as_bucket_view,
                knobs.broadcast_buffers,
                knobs.bucket_cap_mb,
            )


def losses_of_compiled(backend):
    """(losses, number of graphs) by kind, with and without recomputing; a broken graph raises."""
    config = AcceleratorConfig(compile=CompileConfig(enable=True, backend=backend, fullgraph=True))
    checkpointed = dataclasses.replace(
        config, activation_checkpointing=ActivationCheckpointingConfig(mode="full")
    )
    found = []
    for degrees in ({}, {"dp_shard": -1}):
        for knobs in (config, checkpointed):
            torch._dynamo.reset()
            counters.clear()
            found.append((losses(degrees, knobs), counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(
                shutil.which(os.environ.get("CXX", "g++")) is None,
                reason="inductor needs a C++ compiler",
            ),
        ),
    ],
)
def test_units_compile_as_whole_graphs(found, backend):
    plain = found[0]["plain"]
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for kinds in run_ranks(losses_of_compiled, 2, backend, init=False, env=env, timeout_s=300):
        for numbers, num_graphs in kinds:
            assert numbers == pytest.approx(plain, rel=1e-5)
            assert num_graphs == 2  # for an input without and with a gradient
