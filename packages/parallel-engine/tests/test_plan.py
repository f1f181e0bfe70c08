"""The plan says without ranks what a run with ranks finds."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_config import (
    AcceleratorConfig,
    ConfigError,
    FSDPConfig,
    GradientAccumulationConfig,
    ParallelismConfig,
)
from parallel_engine import Engine, plan
from parallel_engine.plan import _empty_chunks_shared
from parallel_engine.wrapping import param_groups
from parallel_testing.ranks import run_ranks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """With an embedding that accelerate makes a unit of its own, and a 0-dim parameter."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(self, width=10, depth=3):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 7)
        self.scale = nn.Parameter(torch.ones(()))

    def get_input_embeddings(self):
        return self.embed

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def real_run(degrees, config=None):
    """(units, bytes of parameters, bytes of optimizer state) of this rank in a run that happens."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(parallelism=ParallelismConfig(**degrees), accelerator=config, device="cpu")
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    names = [n or "(root)" for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    ids = torch.arange(4).reshape(2, 2)
    engine.step(model, optimizer, None, [ids], lambda m, b: m(b).mean())
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    state = [
        (t.to_local() if isinstance(t, DTensor) else t)
        for s in optimizer.state.values()
        for t in s.values()
        if torch.is_tensor(t) and t.ndim
    ]
    return names, sum(t.numel() * 4 for t in held), sum(t.numel() * 4 for t in state)


@pytest.mark.parametrize(
    ("world_size", "degrees"),
    [(2, {"dp_shard": -1}), (4, {"dp_replicate": 2, "dp_shard": 2})],
)
def test_units_and_bytes_are_those_of_a_real_run(world_size, degrees):
    planned = plan(Model, ParallelismConfig(**degrees), AcceleratorConfig(), world_size)
    results = run_ranks(real_run, world_size, degrees, init=False)
    names, param_bytes, state_bytes = results[0]
    assert {name for unit in planned.units for name in unit.name.split("+")} == set(names)
    assert "embed" in names
    assert planned.param_bytes == param_bytes == max(r[1] for r in results)
    # The 0-dim scale's two moments are 0-dim as well.
    assert planned.optimizer_bytes == state_bytes + 8
    whole = sum(p.numel() for p in Model().parameters())
    assert planned.num_params == whole
    assert sum(unit.num_params for unit in planned.units) == whole - 1


def test_figures_by_hand():
    config = AcceleratorConfig(
        mixed_precision="bf16", gradient_accumulation=GradientAccumulationConfig(steps=3)
    )
    planned = plan(Model, ParallelismConfig(dp_shard=2), config, 2, batch_size=5)
    block = 10 * 40 + 40 + 40 * 10 + 10
    by_name = {unit.name: unit for unit in planned.units}
    assert by_name["blocks.1"].num_params == block
    assert by_name["blocks.1"].gather_bytes == 2 * block
    assert by_name["blocks.1"].shard_bytes == 2 * block
    assert planned.global_batch == 5 * 2 * 3
    assert (by_name["blocks.1"].gathers, by_name["(root)"].gathers) == (2, 1)
    # The head's 7 rows become 8 for two ranks; the root stays gathered, so that it is sent once.
    root = 8 * 10 + 8
    others = 50 * 10 + 3 * block
    assert by_name["(root)"].gather_bytes == 2 * root
    gathered, reduced = 3 * (2 * root + 2 * 2 * others), 4 * (root + others)
    scale = 4
    assert planned.comm_bytes_per_step == (gathered + reduced) // 2 + scale
    assert planned.accumulated_bytes == reduced
    assert "keeps 12.3 KiB of whole gradients" in planned.warnings[-1]
    assert planned.gather_peak_bytes == 2 * root + 2 * 2 * block


class Sent(TorchDispatchMode):
    """Name and bytes of what goes into and comes out of every collective."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d."):
            sizes = [num_bytes(arg) for arg in args[:2]]
            self.calls.append((name.split(".")[1].strip("_").removesuffix("_base"), *sizes))
        return func(*args, **(kwargs or {}))


def num_bytes(value):
    if torch.is_tensor(value):
        return value.numel() * value.element_size()
    return sum(map(num_bytes, value)) if isinstance(value, (list, tuple)) else 0


def whole_gradient(param):
    """Torch 2.11 keeps one in another dtype than the backward pass's apart from the parameter."""
    gradient = param.unsharded_param.grad
    return param.unsharded_accumulated_grad if gradient is None else gradient


def collectives(degrees, config, dtype):
    """Those of the second update, and whole gradients between its first two micro-batches."""
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(parallelism=ParallelismConfig(**degrees), accelerator=config, device="cpu")
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    ids = torch.arange(4).reshape(2, 2)
    window = [ids] * config.gradient_accumulation.steps
    kept = []

    def loss_fn(model, batch):
        units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        groups = [g for unit in units for g in param_groups(unit)]
        params = [p for g in groups for p in g.fsdp_params]
        whole = [whole_gradient(p) for p in params if hasattr(p, "_unsharded_param")]
        kept.append(sum(num_bytes(g) for g in whole if g is not None))
        return model(batch).mean()

    engine.step(model, optimizer, None, window, loss_fn)
    kept.clear()
    with Sent() as sent:
        engine.step(model, optimizer, None, window, loss_fn)
    return sent.calls, kept[-1]


BF16 = AcceleratorConfig(
    mixed_precision="bf16", gradient_accumulation=GradientAccumulationConfig(steps=2)
)
SYNCED = AcceleratorConfig(
    gradient_accumulation=GradientAccumulationConfig(steps=2, sync_each_batch=True)
)


@pytest.mark.parametrize(
    ("world_size", "degrees", "config", "dtype"),
    [
        (2, {"dp_shard": 2}, AcceleratorConfig(), torch.float64),
        (2, {"dp_shard": 2}, BF16, torch.float32),
        (4, {"dp_replicate": 2, "dp_shard": 2}, AcceleratorConfig(), torch.float32),
        (4, {"dp_replicate": 2, "dp_shard": 2}, SYNCED, torch.float32),
        (2, {}, AcceleratorConfig(), torch.float32),
        (2, {}, SYNCED, torch.float32),
    ],
    ids=["fsdp float64", "fsdp bf16 accumulated", "hsdp", "hsdp synced", "ddp", "ddp synced"],
)
def test_collectives_are_those_of_a_real_run(world_size, degrees, config, dtype):
    planned = plan(lambda: Model().to(dtype), ParallelismConfig(**degrees), config, world_size)
    calls, kept = run_ranks(
        collectives, world_size, degrees, config, dtype, init=False, timeout_s=180
    )[0]
    steps = config.gradient_accumulation.steps
    found = {name: sorted(c[1:] for c in calls if c[0] == name) for name, *_ in calls}
    gathered = [u.gather_bytes for u in planned.units for _ in range(steps * u.gathers)]
    assert [out for out, _ in found.get("allgather", [])] == sorted(gathered)
    syncs = steps if config.gradient_accumulation.sync_each_batch else 1
    reduced = sorted(u.reduce_bytes for u in planned.units for _ in range(syncs))
    assert [whole for _, whole in found.get("reduce_scatter", [])] == reduced
    # A few numbers come on top of every update. Between the devices: loss, weight and squared norm.
    # Between the hosts: two of the order of units, two requests, a weight, and new metric names.
    riders = [24, 48]
    sums = [num_bytes for num_bytes, _ in found["allreduce"]]
    for rider in riders:
        sums.remove(rider)
    received = sum(out - own for out, own in found.get("allgather", []))
    received += sum(whole - own for own, whole in found.get("reduce_scatter", []))
    own = dtype.itemsize  # the 0-dim scale is reduced over all ranks, shards over the replicas
    if planned.units:
        sums.remove(own)
        received += 2 * own * (world_size - 1) / world_size
    replicas = planned.dp_replicate
    received += sum(2 * s * (replicas - 1) / replicas for s in sums)
    assert planned.comm_bytes_per_step == round(received)
    if steps > syncs:
        # The plan counts padded rows, the gradients have none.
        assert kept <= planned.accumulated_bytes < 1.02 * kept
    else:
        assert kept == planned.accumulated_bytes == 0


def test_an_engine_plans_its_own_config_for_any_launch():
    engine = Engine(parallelism=ParallelismConfig(dp_shard=-1), accelerator=BF16, device="cpu")
    planned = engine.plan(Model, 64, batch_size=3)
    assert planned == plan(Model, ParallelismConfig(dp_shard=-1), BF16, 64, batch_size=3)
    assert (planned.kind, planned.dp_shard, planned.global_batch) == ("fsdp", 64, 3 * 64 * 2)
    assert engine.plan(Model).kind == "single"


def plan_among_ranks():
    with pytest.raises(RuntimeError, match="belongs to no process group"):
        Engine(parallelism=ParallelismConfig(dp_shard=-1), device="cpu").plan(Model)


def test_one_of_several_ranks_is_told_where_to_plan():
    run_ranks(plan_among_ranks, 2, init=False)


def test_masters_of_a_narrow_model_are_counted_in_fp32_on_every_kind():
    config = AcceleratorConfig(mixed_precision="bf16")
    for world_size, degrees in ((1, {}), (2, {}), (2, {"dp_shard": 2})):
        planned = plan(lambda: Model().bfloat16(), ParallelismConfig(**degrees), config, world_size)
        wide = plan(Model, ParallelismConfig(**degrees), config, world_size)
        assert planned == wide


def test_single_and_ddp_hold_everything():
    alone = plan(Model, ParallelismConfig(), AcceleratorConfig(), 1)
    ddp = plan(Model, ParallelismConfig(), AcceleratorConfig(), 4)
    assert (alone.kind, ddp.kind) == ("single", "ddp")
    assert alone.param_bytes == ddp.param_bytes == 4 * alone.num_params
    assert alone.comm_bytes_per_step == 0
    assert ddp.comm_bytes_per_step == 2 * ddp.grad_bytes * 3 // 4


class Operations(TorchDispatchMode):
    """Counts operations, and the bytes of the largest result that has memory."""

    def __init__(self):
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += 1
        if isinstance(out, torch.Tensor) and not isinstance(out, DTensor) and not out.is_meta:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


def test_a_6b_model_on_64_ranks_is_planned_without_its_memory():
    with Operations() as operations:
        planned = plan(
            lambda: Model(4096, 45),
            ParallelismConfig(dp_replicate=8, dp_shard=8),
            AcceleratorConfig(mixed_precision="bf16"),
            64,
        )
    assert operations.count > 100
    assert operations.largest < 1 << 16
    assert planned.kind == "hsdp"
    assert planned.num_params > 6e9
    assert planned.param_bytes == pytest.approx(4 * planned.num_params / 8, rel=0.01)
    assert "hsdp on 64 rank(s): dp_replicate 8 x dp_shard 8" in planned.render()
    assert json.loads(planned.to_json())["units"][1]["name"] == planned.units[1].name
    assert not dist.is_initialized()


def test_more_ranks_do_not_mean_more_work():
    """FSDP2 makes an empty tensor for every rank and parameter: minutes for the largest cluster."""
    counts = []
    for world_size in (64, 2**17):
        with Operations() as operations:
            planned = plan(Model, ParallelismConfig(dp_shard=-1), AcceleratorConfig(), world_size)
        assert planned.units[0].shard_bytes > 0
        counts.append(operations.count)
    assert 0 < counts[1] < 1.5 * counts[0]


@pytest.mark.parametrize(("size", "count"), [(3, 5), (5, 3), (4, 4), (1, 1)])
def test_canary_fsdp2_cuts_parameters_as_the_plan_has_it(size, count):
    original = _fsdp_param._chunk_with_empty
    tensor = torch.arange(2.0 * size).reshape(size, 2)
    with _empty_chunks_shared():
        assert _fsdp_param._chunk_with_empty is not original
        ours = _fsdp_param._chunk_with_empty(tensor, count, dim=0)
    assert _fsdp_param._chunk_with_empty is original
    theirs = original(tensor, count, dim=0)
    assert len(ours) == len(theirs) == count
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_plan_is_refused_like_the_run():
    with pytest.raises(ConfigError, match="has 3 ranks"):
        plan(Model, ParallelismConfig(dp_shard=2), AcceleratorConfig(), 3)
    config = AcceleratorConfig(fsdp=FSDPConfig(wrap_modules=("Blok",)))
    with pytest.raises(ConfigError, match="Did you mean 'Block'"):
        plan(Model, ParallelismConfig(dp_shard=2), config, 2)


def test_one_huge_unit_is_warned_of():
    config = AcceleratorConfig(fsdp=FSDPConfig(wrap_modules=("Embedding",)))
    warned = plan(lambda: Model(1, 1), ParallelismConfig(dp_shard=2), config, 2)
    assert any(" holds " in text for text in warned.warnings)
    config = AcceleratorConfig(fsdp=FSDPConfig(wrap_modules=("ModuleList",)))
    with pytest.raises(ConfigError, match="ModuleList, a container"):
        plan(Model, ParallelismConfig(dp_shard=2), config, 2)


def test_units_by_size_are_those_of_a_real_run_and_no_container():
    config = AcceleratorConfig(fsdp=FSDPConfig(min_num_params=500))
    planned = plan(Model, ParallelismConfig(dp_shard=2), config, 2)
    names, param_bytes, _ = run_ranks(real_run, 2, {"dp_shard": 2}, config, init=False)[0]
    assert set(names) == {"(root)", "embed", "blocks.0", "blocks.1", "blocks.2"}
    assert {name for unit in planned.units for name in unit.name.split("+")} == set(names)
    assert planned.param_bytes == param_bytes
