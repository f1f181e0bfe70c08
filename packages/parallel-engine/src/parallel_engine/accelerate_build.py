"""From the config to accelerate's objects: every field explicit, then compared with the config.

accelerate fills every field left open from its environment variables, and one of them
(`ACCELERATE_GRADIENT_ACCUMULATION_STEPS`) beats even an explicit number, though not a plugin. So
nothing is left open, and what it ended up with is checked: a difference is an error that names the
variable, unless `PARALLEL_ALLOW_ACCELERATE_ENV=1` lets the environment win. It never wins over the
kind, the device or the degrees.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate import ParallelismConfig as AccelerateParallelism
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    TorchDynamoPlugin,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from parallel_config import AcceleratorConfig, ConfigError, Kind, Problem, Topology
from parallel_config.environment import ALLOW_VARIABLE, LaunchFacts, environment_wins
from parallel_engine.cpu_fsdp import shard_on_cpu

DTYPES = {"no": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What accelerate itself writes into the environment while its objects are built.
_WRITTEN = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_MIXED_PRECISION")

# What accelerate reads of a launch; of several that are set it takes now the one, now the other.
_LAUNCH = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)


def build_accelerator(
    config: AcceleratorConfig,
    topology: Topology,
    device: torch.device,
    *,
    ignored: Sequence[nn.Module] = (),
    facts: LaunchFacts | None = None,
) -> Accelerator:
    """Collective where sharded. Accelerate's view of the config.

    `facts` are those of the environment by default.
    """
    # accelerate keeps the state of an earlier Accelerator of this process, and would use it here.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    facts = LaunchFacts.read() if facts is None else facts
    with _environment_as_it_was(), _launched_as(launch_of(facts, device)):
        plugin = mesh = None
        if topology.is_sharded:
            plugin = fsdp_plugin(config, ignored)
            mesh = _parallelism(topology)
        on_cpu = device.type == "cpu"
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=config.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=config.gradient_accumulation.steps,
                adjust_scheduler=False,
                sync_with_dataloader=False,
                sync_each_batch=config.gradient_accumulation.sync_each_batch,
            ),
            step_scheduler_with_optimizer=False,
            dynamo_plugin=_no_dynamo(),
            fsdp_plugin=None if on_cpu else plugin,
            parallelism_config=None if on_cpu else mesh,
            kwargs_handlers=[_ddp_handler(config), GradScalerKwargs()],
        )
        if plugin is not None and on_cpu:
            shard_on_cpu(accelerator, plugin, mesh)
    return accelerator


def require_as_configured(
    accelerator: Accelerator, config: AcceleratorConfig, topology: Topology, device: torch.device
) -> None:
    """Compare what accelerate ended up with.

    Kind, device and degrees are the engine's own too, so they differ under no variable: accelerate
    would shard a model that the engine replicates.

    Raises:
        ConfigError: it differs from the config; names the variables.
    """
    problems = list(_differences(accelerator, config, topology, device))
    if problems:
        raise ConfigError(problems, source="accelerate")


def mixed_precision_policy(config: AcceleratorConfig) -> MixedPrecisionPolicy:
    """Compute dtype and reduction dtype of FSDP2; accelerate's own "bf16" reduces in bf16.

    fp32 widens the reduction of narrower gradients; without mixed precision it would narrow those
    of a float64 model, so gradients then keep the parameters' dtype.
    """
    reduce_dtype = DTYPES[config.fsdp.reduce_dtype]
    if config.mixed_precision == "no" and config.fsdp.reduce_dtype == "fp32":
        reduce_dtype = None
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[config.mixed_precision], reduce_dtype=reduce_dtype
    )


def fsdp_plugin(
    config: AcceleratorConfig, ignored: Sequence[nn.Module]
) -> FullyShardedDataParallelPlugin:
    """Accelerate's FSDP2 knobs. Which modules become units is said by `only_with_size`."""
    whole = [parameter for module in ignored for parameter in module.parameters()]
    with _environment_as_it_was():
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=config.fsdp.reshard_after_forward,
            mixed_precision_policy=mixed_precision_policy(config),
            auto_wrap_policy="size_based_wrap",
            transformer_cls_names_to_wrap=None,
            min_num_params=1,  # the units alone have that, see only_with_size
            cpu_offload=_offload_policy() if config.fsdp.cpu_offload else False,
            # None would be filled from FSDP_IGNORED_MODULES. A list of their own keeps its size.
            ignored_modules=[nn.ParameterList(whole)] if whole else [],
            state_dict_type="SHARDED_STATE_DICT",
            limit_all_gathers=True,
            activation_checkpointing=False,
            activation_checkpointing_offload=False,
            cpu_ram_efficient_loading=False,
        )


def _offload_policy() -> CPUOffloadPolicy:
    """Pinned memory speeds copies to a GPU and cannot be had without one."""
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def _parallelism(topology: Topology) -> AccelerateParallelism:
    return AccelerateParallelism(
        dp_replicate_size=topology.dp_replicate,
        dp_shard_size=topology.dp_shard,
        tp_size=1,
        cp_size=1,
        cp_backend="torch",
        sp_size=1,
        sp_backend="deepspeed",
    )


def _no_dynamo() -> TorchDynamoPlugin:
    """Compiling is per wrap unit and ours; accelerate's is off whatever the environment says."""
    return TorchDynamoPlugin(
        backend=DynamoBackend.NO,
        mode="default",
        fullgraph=False,
        dynamic=False,
        use_regional_compilation=False,
    )


def _ddp_handler(config: AcceleratorConfig) -> DistributedDataParallelKwargs:
    return DistributedDataParallelKwargs(
        find_unused_parameters=config.ddp.find_unused_parameters,
        static_graph=config.ddp.static_graph,
        bucket_cap_mb=config.ddp.bucket_cap_mb,
        gradient_as_bucket_view=config.ddp.gradient_as_bucket_view,
        broadcast_buffers=config.ddp.broadcast_buffers,
    )


@contextlib.contextmanager
def without_mesh_warnings() -> Iterator[None]:
    """Around accelerate's `prepare`, whose way to cut its mesh is deprecated in torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        yield


@contextlib.contextmanager
def _environment_as_it_was() -> Iterator[None]:
    """Undo what accelerate exports, or a second engine and child processes trip our own guard."""
    before = {name: os.environ.get(name) for name in _WRITTEN}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def launch_of(facts: LaunchFacts, device: torch.device) -> dict[str, str]:
    """What accelerate is to find in the environment about the launch.

    Nothing for a single rank, for which it would start a process group. It takes several for one
    without LOCAL_RANK, and runs on the CUDA device of that number, so that is the device's. The
    address is only looked for: the group is there already.
    """
    if facts.world_size == 1:
        return {}
    return {
        "RANK": str(facts.rank),
        "WORLD_SIZE": str(facts.world_size),
        "LOCAL_RANK": str(device.index if device.type == "cuda" else facts.local_rank),
        "LOCAL_WORLD_SIZE": str(facts.local_world_size),
        "MASTER_ADDR": facts.master_addr or "localhost",
        "MASTER_PORT": facts.master_port or "0",
    }


@contextlib.contextmanager
def _launched_as(launch: dict[str, str]) -> Iterator[None]:
    """Inside, the environment says this of the launch and nothing else."""
    before = {name: os.environ.pop(name) for name in _LAUNCH if name in os.environ}
    os.environ.update(launch)
    try:
        yield
    finally:
        for name in _LAUNCH:
            os.environ.pop(name, None)
        os.environ.update(before)


def _differences(
    accelerator: Accelerator, config: AcceleratorConfig, topology: Topology, device: torch.device
) -> Iterator[Problem]:
    for field, found, wanted, *variables in _structure(accelerator, topology, device):
        if found != wanted:
            yield _difference(field, found, wanted, variables, may_win=False)
    for field, found, wanted, variable in _effective(accelerator, config, topology):
        if found != wanted and not environment_wins():
            yield _difference(field, found, wanted, [variable], may_win=True)


def _difference(
    field: str, found: object, wanted: object, variables: Sequence[str], *, may_win: bool
) -> Problem:
    given = [name for name in variables if name in os.environ]
    message = f"= {wanted}, but accelerate ended up with {found}"
    if not given:
        return Problem(
            field,
            f"{message}; {', '.join(variables)} would explain it, but is not set.",
            f"accelerate {accelerate.__version__} may behave otherwise than 1.15, which is known.",
        )
    others = f", or set {ALLOW_VARIABLE}=1 to let the environment win" if may_win else ""
    return Problem(
        field,
        f"{message} because of {', '.join(f'{name} = {os.environ[name]!r}' for name in given)}.",
        f"Unset {' and '.join(given)}{others}.",
    )


def _structure(
    accelerator: Accelerator, topology: Topology, device: torch.device
) -> Iterator[tuple[Any, ...]]:
    """(field, what accelerate has, what the engine has, the variables that would explain it)."""
    devices = with_index(accelerator.device), with_index(device)
    yield "device", *devices, "ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE"
    yield "world size", accelerator.num_processes, topology.world_size, "WORLD_SIZE"
    expected = {
        Kind.SINGLE: DistributedType.NO,
        Kind.DDP: DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU,
    }.get(topology.kind, DistributedType.FSDP)
    backends = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
    yield "kind", accelerator.distributed_type, expected, *backends
    found = _degrees(accelerator.state.parallelism_config)
    wanted = _degrees(_parallelism(topology)) if topology.is_sharded else {}
    yield "degrees", found, wanted, "ACCELERATE_USE_PARALLELISM_CONFIG"


def _degrees(parallelism: AccelerateParallelism | None) -> dict[str, int]:
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    return {} if parallelism is None else {name: getattr(parallelism, name) for name in names}


def _effective(
    accelerator: Accelerator, config: AcceleratorConfig, topology: Topology
) -> Iterator[tuple[str, object, object, str]]:
    """(field, what accelerate has, what the config says, the variable that would explain it)."""
    state = accelerator.state
    yield (
        "accelerator.gradient_accumulation.steps",
        accelerator.gradient_accumulation_steps,
        config.gradient_accumulation.steps,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )
    yield (
        "accelerator.mixed_precision",
        state.mixed_precision,
        config.mixed_precision,
        "ACCELERATE_MIXED_PRECISION",
    )
    yield (
        "accelerator.compile.backend",
        state.dynamo_plugin.backend,
        DynamoBackend.NO,
        "ACCELERATE_DYNAMO_BACKEND",
    )
    fp8 = str(accelerator.fp8_backend.value)
    yield "fp8 backend", fp8, "NO", "ACCELERATE_FP8_BACKEND"
    if topology.is_sharded:
        yield from _effective_fsdp(state.fsdp_plugin, config)


def with_index(device: torch.device) -> torch.device:
    """The device with its number, which accelerate leaves out or makes up: it knows a cpu:1."""
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def _effective_fsdp(
    plugin: FullyShardedDataParallelPlugin, config: AcceleratorConfig
) -> Iterator[tuple[str, object, object, str]]:
    section = "accelerator.fsdp"
    yield f"{section}.version", plugin.fsdp_version, 2, "FSDP_VERSION"
    yield (
        f"{section}.reshard_after_forward",
        plugin.reshard_after_forward,
        config.fsdp.reshard_after_forward,
        "FSDP_RESHARD_AFTER_FORWARD",
    )
    yield (
        f"{section}.cpu_offload",
        type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        config.fsdp.cpu_offload,
        "FSDP_OFFLOAD_PARAMS",
    )
    yield (
        f"{section}.state_dict_type",
        str(plugin.state_dict_type).rpartition(".")[2],
        "SHARDED_STATE_DICT",
        "FSDP_STATE_DICT_TYPE",
    )
    yield (
        "accelerator.activation_checkpointing",
        plugin.activation_checkpointing,
        False,
        "FSDP_ACTIVATION_CHECKPOINTING",
    )
    yield (
        f"{section}.cpu_ram_efficient_loading",
        plugin.cpu_ram_efficient_loading,
        False,
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
    )
    policy = plugin.mixed_precision_policy
    wanted = mixed_precision_policy(config)
    yield (
        "accelerator.mixed_precision",
        (policy.param_dtype, policy.reduce_dtype),
        (wanted.param_dtype, wanted.reduce_dtype),
        "ACCELERATE_MIXED_PRECISION",
    )
