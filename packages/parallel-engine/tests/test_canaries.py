"""Behaviour of accelerate and torch that the engine leans on or works around.

A failure here means that a release changed underneath: the message says which module to look at.
"""

import inspect
import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed import PrefixStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallel_config import AcceleratorConfig, FSDPConfig, ParallelismConfig, clean_fqn
from parallel_engine import Engine
from parallel_engine.determinism import fix_buckets
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


def used_by_fsdp2_prepare_model():
    return set(re.findall(r"\baccelerator\.(\w+)", inspect.getsource(fsdp2_prepare_model)))


def test_sharding_looks_at_these_parts_of_an_accelerator():
    """The stand-in of plan.py has these and no more."""
    assert used_by_fsdp2_prepare_model() <= {
        "device",
        "is_main_process",
        "mixed_precision",
        "parallelism_config",
        "state",
        "torch_device_mesh",
    }


class Attention(nn.Module):
    def forward(self, x, attention_mask=None):
        assert attention_mask is not None
        return x * attention_mask


class Masked(nn.Module):
    """What accelerate's hooks for context parallelism would lay hands on."""

    _fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.linear, self.self_attn = nn.Linear(4, 4), Attention()

    def forward(self, x):
        return self.self_attn(self.linear(x), attention_mask=torch.ones(4))


def hooks_and_lazy_units():
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(parallelism=ParallelismConfig(dp_shard=-1), device="cpu")
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    # The declared call may begin with a unit below the root; see entry_points.py.
    state = model._get_fsdp_state()
    below = model.linear._get_fsdp_state()
    roots = (state._is_root, below._is_root)
    engine.step(model, optimizer, None, [torch.ones(2, 4)], lambda m, x: m(x).mean())
    hooks = [hook.__qualname__ for hook in model.self_attn._forward_pre_hooks.values()]
    return roots, hooks


def test_the_root_is_decided_by_lazy_init_and_masks_reach_attention():
    """entry_points.py calls `_lazy_init`; accelerate hooks `self_attn` for context parallelism."""
    for roots, hooks in run_ranks(hooks_and_lazy_units, 2, init=False):
        assert roots == (True, False)
        assert hooks == []


def a_unit_before_its_root():
    model = Masked()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    fully_shard(model.linear, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.linear(torch.ones(2, 4))
    try:
        model(torch.ones(2, 4))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_unit_that_runs_before_its_root_takes_itself_for_the_root():
    """Once it does not, entry_points.py need not call `_lazy_init`."""
    assert all("lazily initialized" in text for text in run_ranks(a_unit_before_its_root, 2))


def store_operations():
    """What failures.py asks of the launch's store."""
    store = PrefixStore("canary", torch.distributed.distributed_c10d._get_default_store())
    rank = torch.distributed.get_rank()
    empty = store.check(["error"])
    torch.distributed.barrier()
    first = store.compare_set("error", "", f"rank {rank}").decode()
    torch.distributed.barrier()
    return empty, first, store.check(["error"]), store.get("error").decode(), store.add("n", 0)


def test_the_first_rank_to_set_an_error_wins():
    results = run_ranks(store_operations, 2)
    assert [found[0] for found in results] == [False, False]
    texts = {text for found in results for text in (found[1], found[3])}
    assert len(texts) == 1
    assert texts <= {"rank 0", "rank 1"}
    assert all(found[2] and found[4] == 0 for found in results)


def test_names_of_wrapped_modules_are_cleaned():
    """units.py wraps by torch's private checkpoint_wrapper, whose prefix names.py knows."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    (name, _), *_ = model.named_parameters()
    assert name != "0.weight"
    assert clean_fqn(name) == "0.weight"


def ddp_sorts_its_buckets_anew(fixed):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    if fixed:
        fix_buckets(model)
    model(torch.ones(2, 4)).sum().backward()
    return model.reducer._rebuild_buckets()


def test_ddps_buckets_are_sorted_anew_unless_they_are_fixed():
    """Once they are not, determinism.fix_buckets can go."""
    assert run_ranks(ddp_sorts_its_buckets_anew, 2, False) == [True, True]
    assert run_ranks(ddp_sorts_its_buckets_anew, 2, True) == [False, False]
