"""Models and environments that are less tidy than the examples."""

import dataclasses
import logging
import os
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from parallel_config import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    CompileConfig,
    DDPConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    ParallelismConfig,
)
from parallel_engine import Engine, NonFiniteError
from parallel_testing.ranks import run_ranks


class Block(nn.Linear):
    pass


class Model(nn.Module):
    """Two blocks, a head in the root unit, and a method that nobody declared."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(4, 4), Block(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

    def undeclared(self, x):
        return Model.forward(self, x)


def prepared(degrees, config=None, **options):
    torch.manual_seed(0)
    model = Model()
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


def losses(degrees, config=None):
    engine, model, optimizer = prepared(degrees, config)
    x = batch_of(engine)
    return [engine.step(model, optimizer, None, [x], mean_square).loss for _ in range(3)]


def calls_an_undeclared_method():
    engine, model, optimizer = prepared({"dp_shard": -1})
    x = batch_of(engine)
    wanted = pytest.raises(RuntimeError, match=r"Model\._fsdp_forward_methods")
    with wanted, engine.micro_batch(model, 0, 1):
        model.undeclared(x)
    return [engine.step(model, optimizer, None, [x], mean_square).loss for _ in range(3)]


def test_an_undeclared_method_names_the_remedy_and_leaves_the_model_usable():
    wanted = run_ranks(losses, 2, {"dp_shard": -1}, init=False)
    assert run_ranks(calls_an_undeclared_method, 2, init=False) == wanted


def calls_an_undeclared_method_under_ddp():
    engine, model, optimizer = prepared({})
    x = batch_of(engine)
    wanted = pytest.raises(AttributeError, match=r'_fsdp_forward_methods = \("undeclared",\)')
    with wanted, engine.micro_batch(model, 0, 1):
        model.undeclared(x)
    unknown = pytest.raises(AttributeError, match="has no attribute 'unknown'")
    with unknown, engine.micro_batch(model, 0, 1):
        model.unknown(x)
    return engine.step(model, optimizer, None, [x], mean_square).loss


def test_an_undeclared_method_under_ddp_names_the_remedy_too():
    found = run_ranks(calls_an_undeclared_method_under_ddp, 2, init=False)
    assert found == [losses_of[0] for losses_of in run_ranks(losses, 2, {}, init=False)]


def logged_units():
    """What the main rank says about the units, and warnings on the way there."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("parallel_engine").addHandler(handler)
    logging.getLogger("parallel_engine").setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared({"dp_shard": -1})
    return lines


def test_number_and_size_of_units_are_logged_once():
    main, other = run_ranks(logged_units, 2, init=False)
    assert main == [
        "3 wrap units (Model._fsdp_wrap_modules), with their parameters: "
        "(root) 10; blocks.0 20; blocks.1 20"
    ]
    assert other == []


@pytest.mark.parametrize(
    "config",
    [
        AcceleratorConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="full")),
        AcceleratorConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="selective")),
        AcceleratorConfig(compile=CompileConfig(enable=True, backend="eager")),
        AcceleratorConfig(compile=CompileConfig(enable=True, backend="aot_eager")),
        AcceleratorConfig(fsdp=FSDPConfig(cpu_offload=True)),
        AcceleratorConfig(fsdp=FSDPConfig(ignored_modules=("head",))),
        AcceleratorConfig(fsdp=FSDPConfig(reshard_after_forward=False)),
    ],
    ids=["full", "selective", "eager", "aot_eager", "cpu_offload", "ignored", "no_reshard"],
)
def test_a_knob_does_not_change_the_numbers(config):
    plain = run_ranks(losses, 2, {}, init=False)[0]
    for found in run_ranks(losses, 2, {"dp_shard": -1}, config, init=False):
        assert found == pytest.approx(plain, rel=1e-5)


DDP_KNOBS = [
    DDPConfig(),
    DDPConfig(find_unused_parameters=True),
    DDPConfig(static_graph=True),
    DDPConfig(bucket_cap_mb=1, gradient_as_bucket_view=False, broadcast_buffers=False),
]


def losses_of_ddp_knobs(accumulation):
    """Losses and norms of three updates under each knob, and whether DDP got it."""
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


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ddps_knobs_are_in_force_and_do_not_change_the_numbers(accumulation):
    for found in run_ranks(losses_of_ddp_knobs, 2, accumulation, init=False):
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
def test_units_compile_as_whole_graphs(backend):
    plain = run_ranks(losses, 2, {}, init=False)[0]
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for found in run_ranks(losses_of_compiled, 2, backend, init=False, env=env, timeout_s=300):
        for numbers, num_graphs in found:
            assert numbers == pytest.approx(plain, rel=1e-5)
            assert num_graphs == 2  # for an input without and with a gradient


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
    losses = [engine.step(model, optimizer, scheduler, [good], mean_square).loss for _ in range(3)]
    return unchanged, rate == 0.1, losses[2] < losses[1] < losses[0]


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("degrees", [{}, {"dp_shard": -1}], ids=["ddp", "fsdp"])
def test_what_is_not_finite_on_one_rank_stops_the_update_on_all(degrees, policy, value):
    """Before weights, rate and counters move."""
    found = run_ranks(not_finite_on_rank_1, 2, policy, degrees, value, init=False)
    assert found == [(True, True, True)] * 2


class Unused(Model):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(4, 2)


def ddp_with_unused(allowed):
    torch.manual_seed(0)
    model = Unused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AcceleratorConfig(ddp=DDPConfig(find_unused_parameters=allowed))
    engine = Engine(accelerator=config, device="cpu")
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    x = batch_of(engine)
    if allowed:
        return [engine.step(model, optimizer, None, [x], mean_square).loss for _ in range(3)]
    with pytest.raises(RuntimeError) as caught:
        engine.step(model, optimizer, None, [x], mean_square)
    return str(caught.value)


def test_ddp_names_unused_parameters_and_the_flag_that_allows_them():
    for message in run_ranks(ddp_with_unused, 2, False, init=False):
        assert "extra.weight" in message
        assert "--accelerator.ddp.find_unused_parameters" in message
    wanted = run_ranks(losses, 2, {}, init=False)
    assert run_ranks(ddp_with_unused, 2, True, init=False) == wanted
