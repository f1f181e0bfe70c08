"""What a run would be, for any world size, without ranks, GPU or memory.

The model is built on the meta device and sharded over a fake process group by accelerate's own
function, so that the units are those of a real run, the ones that accelerate adds included. The
figures are rank 0's: it holds the largest shards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallel_config import AcceleratorConfig, ParallelismConfig, Topology
from parallel_engine import preflight
from parallel_engine.accelerate_build import fsdp_plugin, mixed_precision_policy
from parallel_engine.fqns import fqn
from parallel_engine.options import option
from parallel_engine.wrapping import (
    only_with_size,
    param_groups,
    resolve_wrap_policy,
    wrap_units,
)

_TINY = 1_000_000


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """A wrap unit: what is gathered and freed together."""

    name: str
    num_params: int
    """Elements of its parameters, whole."""
    shard_bytes: int
    """Its parameters as rank 0 keeps them."""
    gather_bytes: int
    """What one all-gather makes: its parameters whole, in the compute dtype, rows padded so that
    every rank sends the same."""
    reduce_bytes: int
    """What one reduce-scatter takes: its gradients whole, in the reduction dtype, padded alike."""
    gathers: int
    """All-gathers in one micro-batch: 2, or 1 where it stays gathered from forward to backward."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """What a run would hold and send; every figure is that of rank 0."""

    kind: str
    world_size: int
    dp_replicate: int
    dp_shard: int
    num_params: int
    num_trainable: int
    batch_size: int
    accumulation: int
    global_batch: int
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    """What the optimizer keeps for each trainable element: as Adam two moments, unless told."""
    accumulated_bytes: int
    """Whole gradients of a sharded model, which a rank keeps from one micro-batch to the next."""
    gather_peak_bytes: int
    """Units that stay gathered, and the two largest neighbours of the others: one in use, one
    prefetched."""
    comm_bytes_per_step: int
    """Received by one rank in one optimizer update: ring all-gathers and reductions."""
    units: tuple[UnitPlan, ...]
    """In the order of the model's modules; empty where nothing is sharded."""
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        """The plan as JSON; sizes in bytes."""
        return json.dumps(asdict(self), indent=2)

    def render(self) -> str:
        """The plan for a terminal."""
        degrees = f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}"
        held = self.param_bytes + self.grad_bytes + self.optimizer_bytes + self.accumulated_bytes
        whole = (
            f" + whole gradients {_size(self.accumulated_bytes)}" if self.accumulated_bytes else ""
        )
        lines = [
            f"{self.kind} on {self.world_size} rank(s): {degrees}",
            f"parameters      {self.num_params:,} ({self.num_trainable:,} trainable)",
            f"global batch    {self.global_batch:,} = batch_size {self.batch_size} x "
            f"{self.world_size} ranks x accumulation {self.accumulation}",
            f"per rank        {_size(held)} = parameters {_size(self.param_bytes)} + gradients "
            f"{_size(self.grad_bytes)} + optimizer {_size(self.optimizer_bytes)}{whole}",
            f"gathered peak   {_size(self.gather_peak_bytes)} (activations come on top)",
            f"communication   {_size(self.comm_bytes_per_step)} received per rank and step",
        ]
        lines += [f"{len(self.units)} wrap units:"] if self.units else []
        lines += [
            f"  {unit.name:<40} {unit.num_params:>15,}  shard {_size(unit.shard_bytes):>10}  "
            f"gathered {_size(unit.gather_bytes):>10}"
            for unit in self.units
        ]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def plan(
    model_factory: Callable[[], nn.Module],
    parallelism: ParallelismConfig,
    accelerator: AcceleratorConfig,
    world_size: int,
    *,
    batch_size: int = 1,
    states_per_param: int = 2,
) -> ShardPlan:
    """What a run on `world_size` ranks would be; call it where no process group runs.

    `model_factory` is called once, under the meta device. `states_per_param` counts the values that
    the optimizer keeps for each trained one: 2 for Adam, and 1 more for an average of the weights.

    Raises:
        ConfigError: the degrees do not fit, or no wrap units are named.
        RuntimeError: this process belongs to a process group.
    """
    topology = parallelism.resolve(world_size)
    with torch.device("meta"):
        model = model_factory()
    preflight.widen_masters(model, accelerator)
    numbers = [(p.numel(), p.requires_grad) for p in model.parameters()]
    units: tuple[UnitPlan, ...] = ()
    if topology.is_sharded:
        with _fake_mesh(topology) as mesh:
            _shard(model, accelerator, mesh)
            units = _units(model, accelerator, topology.dp_shard)
    param_bytes = sum(_local_bytes(p) for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    grad_bytes = sum(_local_bytes(p) for p in trained)
    steps = accelerator.gradient_accumulation.steps
    keeps_whole = _syncs(accelerator) < steps
    accumulated = sum(unit.reduce_bytes for unit in units) if keeps_whole else 0
    return ShardPlan(
        kind=topology.kind.value,
        world_size=world_size,
        dp_replicate=topology.dp_replicate,
        dp_shard=topology.dp_shard,
        num_params=sum(count for count, _ in numbers),
        num_trainable=sum(count for count, trainable in numbers if trainable),
        batch_size=batch_size,
        accumulation=steps,
        global_batch=batch_size * topology.dp_world_size * steps,
        param_bytes=param_bytes,
        grad_bytes=grad_bytes,
        optimizer_bytes=states_per_param * grad_bytes,
        accumulated_bytes=accumulated,
        gather_peak_bytes=_gather_peak(units),
        comm_bytes_per_step=_communication(model, units, topology, accelerator),
        units=units,
        warnings=(*_warnings(units), *_accumulation_warning(accumulated, steps)),
    )


@contextlib.contextmanager
def _fake_mesh(topology: Topology) -> Iterator[DeviceMesh]:
    """A mesh of ranks that do not exist, with this process posing as rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "a plan is made in one process that belongs to no process group: call "
            "parallel_engine.plan before the Engine of several ranks, or without a launcher"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=topology.world_size)
    try:
        axes = {"replicate": topology.dp_replicate, "shard": topology.dp_shard}
        axes = {name: size for name, size in axes.items() if size > 1}
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()


def _shard(model: nn.Module, config: AcceleratorConfig, mesh: DeviceMesh) -> None:
    """Accelerate's sharding with as much of an Accelerator as it looks at."""
    units = wrap_units(model, resolve_wrap_policy(model, config.fsdp))
    plugin = fsdp_plugin(config, preflight.ignored_modules(model, config))
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        device=torch.device("meta"),
        mixed_precision=config.mixed_precision,
        is_main_process=False,
    )
    with only_with_size(model, units.values()), _empty_chunks_shared():
        fsdp2_prepare_model(stand_in, model)


@contextlib.contextmanager
def _empty_chunks_shared() -> Iterator[None]:
    """Inside, FSDP2 makes one empty tensor for all ranks beyond a parameter's size.

    It makes one for each rank, of each parameter, to look at its own: minutes for thousands.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def chunks(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        found = list(torch.chunk(tensor, num_chunks, dim=dim))
        return found + [found[0].new_empty(0)] * (num_chunks - len(found))

    names = vars(_fsdp_param)
    original = names["_chunk_with_empty"]
    names["_chunk_with_empty"] = chunks
    try:
        yield
    finally:
        names["_chunk_with_empty"] = original


def _units(model: nn.Module, config: AcceleratorConfig, dp_shard: int) -> tuple[UnitPlan, ...]:
    policy = mixed_precision_policy(config)
    names = {id(module): fqn(model, name) or "(root)" for name, module in model.named_modules()}
    seen: set[int] = set()
    units = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        for group in param_groups(module):
            if id(group) in seen:
                continue
            seen.add(id(group))
            # FSDP2 decides for the root in its first forward: it stays gathered.
            stays = group.post_forward_mesh_info is None or state._auto_reshard_after_forward
            shards = [param.sharded_param for param in group.fsdp_params]
            padded = {
                id(param.sharded_param): dp_shard * param.padded_sharded_param_size.numel()
                for param in group.fsdp_params
            }
            units.append(
                UnitPlan(
                    name="+".join(names[id(m)] for m in group.modules),
                    num_params=sum(p.numel() for p in shards),
                    shard_bytes=sum(_local_bytes(p) for p in shards),
                    gather_bytes=sum(padded[id(p)] * _width(p, policy.param_dtype) for p in shards),
                    reduce_bytes=sum(
                        padded[id(p)] * _width(p, policy.reduce_dtype or policy.param_dtype)
                        for p in shards
                        if p.requires_grad
                    ),
                    gathers=1 if stays else 2,
                )
            )
    return tuple(units)


def _width(parameter: torch.Tensor, dtype: torch.dtype | None) -> int:
    return (dtype or parameter.dtype).itemsize


def _gather_peak(units: tuple[UnitPlan, ...]) -> int:
    staying = sum(unit.gather_bytes for unit in units if unit.gathers == 1)
    passing = [unit.gather_bytes for unit in units if unit.gathers > 1]
    pairs = [a + b for a, b in itertools.pairwise(passing)]
    return staying + max(pairs or passing or [0])


def _syncs(config: AcceleratorConfig) -> int:
    """How often an update reduces its gradients."""
    accumulation = config.gradient_accumulation
    return accumulation.steps if accumulation.sync_each_batch else 1


def _communication(
    model: nn.Module, units: tuple[UnitPlan, ...], topology: Topology, config: AcceleratorConfig
) -> int:
    """Ring figures: a gather of S bytes over n ranks receives S(n-1)/n, an all-reduce twice it."""
    steps = config.gradient_accumulation.steps
    trained = [p for p in model.parameters() if p.requires_grad]
    # What FSDP2 leaves alone, and under DDP everything, is reduced whole.
    whole = sum(_local_bytes(p) for p in trained if not isinstance(p, DTensor))
    # The engine averages what FSDP2 leaves alone once per update, DDP syncs it with the rest.
    total = (1 if units else _syncs(config)) * _all_reduce(whole, topology.world_size)
    part = (topology.dp_shard - 1) / topology.dp_shard
    for unit in units:
        total += steps * unit.gathers * unit.gather_bytes * part
        replicas = _all_reduce(unit.reduce_bytes / topology.dp_shard, topology.dp_replicate)
        total += _syncs(config) * (unit.reduce_bytes * part + replicas)
    return round(total)


def _all_reduce(num_bytes: float, num_ranks: int) -> float:
    return 2 * num_bytes * (num_ranks - 1) / num_ranks


def _accumulation_warning(accumulated: int, steps: int) -> Iterator[str]:
    if accumulated:
        yield (
            f"with {steps} micro-batches per update each rank keeps {_size(accumulated)} of whole "
            f"gradients from one to the next: {option('gradient_accumulation.sync_each_batch')} "
            "keeps only shards, for more communication"
        )


def _warnings(units: tuple[UnitPlan, ...]) -> Iterator[str]:
    if not units:
        return
    below = [unit for unit in units if unit.num_params]
    total = sum(unit.num_params for unit in below)
    largest = max(below, key=lambda unit: unit.num_params)
    if len(below) > 1 and largest.num_params > total / 2:
        share = round(100 * largest.num_params / total)
        yield (
            f"unit {largest.name} holds {share}% of the parameters, so the gathered peak stays "
            f"near the whole model: name smaller modules with {option('fsdp.wrap_modules')}"
        )
    tiny = [unit for unit in below if unit.num_params < _TINY]
    if len(tiny) > 16:
        yield (
            f"{len(tiny)} units have fewer than {_TINY:,} parameters: their all-gathers are bound "
            f"by latency, larger units are faster: {option('fsdp.min_num_params')}"
        )


def _local_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"
