"""Behaviour of accelerate and torch that the engine leans on or works around.

A failure here means that a release changed underneath: the message says which module to look at.
"""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch import nn
from torch.distributed.fsdp import fully_shard

from parallel_config import (
    AcceleratorConfig,
    FSDPConfig,
    ParallelismConfig,
)
from parallel_engine import Engine
from parallel_testing.ranks import run_ranks


def plugin_on_cpu():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(cpu=True, fsdp_plugin=plugin).distributed_type.value


def test_accelerate_drops_the_fsdp_plugin_on_cpu():
    """Once it does not, cpu_fsdp.py can go."""
    assert set(run_ranks(plugin_on_cpu, 2)) == {"MULTI_CPU"}


def steps_with_variable_set():
    plugin = GradientAccumulationPlugin(num_steps=2)
    # Read at once: all Accelerators of a process share this number.
    by_argument = Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps
    by_plugin = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    return by_argument, by_plugin.gradient_accumulation_steps


def test_the_accumulation_variable_beats_the_argument_but_not_the_plugin():
    """accelerate_build.py hands over the plugin for this reason."""
    env = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
    assert run_ranks(steps_with_variable_set, 1, init=False, env=env) == [(8, 2)]


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def shard_scalar():
    try:
        fully_shard(Scalar(), mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    except ValueError as error:
        return str(error)
    return "no error"


def test_fsdp2_refuses_a_scalar_parameter():
    """Once it does not, preflight.ignored_modules need not keep 0-dim parameters whole."""
    assert all("scalar" in message for message in run_ranks(shard_scalar, 2))


class Probe(nn.Module):
    """Records the dtype that its entry points compute in."""

    _fsdp_wrap_modules = ("Linear",)
    _fsdp_forward_methods = ("compute_loss",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)

    def compute_loss(self, x):
        hidden = self.linear(x)
        self.seen = hidden.dtype
        return hidden.float().square().mean()


def declared_method_dtype(degrees, precision):
    torch.manual_seed(0)
    model = Probe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(mixed_precision=precision, fsdp=FSDPConfig()),
        device="cpu",
    )
    prepared, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    batch = [torch.ones(2, 4) * (1 + engine.rank)]
    report = engine.step(prepared, optimizer, None, batch, lambda m, x: m.compute_loss(x))
    return str(model.seen), report.grad_norm


@pytest.mark.parametrize(
    ("world_size", "degrees"), [(1, {}), (2, {}), (2, {"dp_shard": -1})], ids=["one", "ddp", "fsdp"]
)
def test_a_declared_method_computes_in_the_configured_precision(world_size, degrees):
    """Accelerate's autocast covers forward alone; entry_points.py covers the others."""
    for precision, wanted in (("bf16", "torch.bfloat16"), ("no", "torch.float32")):
        results = run_ranks(
            declared_method_dtype, world_size, degrees, precision, init=world_size > 1
        )
        assert {dtype for dtype, _ in results} == {wanted}
        # One gradient on all ranks: the call went through the reduction.
        assert len({norm for _, norm in results}) == 1
        assert results[0][1] > 0
