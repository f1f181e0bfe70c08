"""What must hold before anything is wrapped; every problem is found at once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel_config import AcceleratorConfig, ConfigError, Problem, Topology
from parallel_config.errors import nearest
from parallel_engine.fqns import fqn
from parallel_engine.materialize import plain_meta_tensors
from parallel_engine.options import option
from parallel_engine.wrapping import resolve_wrap_policy, wrap_units


def check(
    model: nn.Module,
    optimizer: Optimizer | None,
    config: AcceleratorConfig,
    topology: Topology,
    device: torch.device,
) -> None:
    """Check everything that can be known before wrapping.

    `optimizer` is None where it is yet to be built, or never.

    Raises:
        ConfigError: every problem, with names and the way out.
    """
    problems = [
        *plain_meta_tensors(model),
        *(optimizer_problems(model, optimizer) if optimizer is not None else ()),
        *(_state_problems(optimizer) if optimizer is not None and topology.is_sharded else ()),
        *_precision_problems(config, topology, device),
        *_compile_problems(config, topology),
        *_ignored_problems(model, config),
        *(_unit_problems(model, config) if topology.is_sharded else ()),
        *(_memory_problems(model) if topology.is_sharded else ()),
    ]
    if problems:
        raise ConfigError(problems)


def ignored_modules(model: nn.Module, config: AcceleratorConfig) -> list[nn.Module]:
    """Modules whose parameters stay whole: those that the config names, and 0-dim parameters.

    FSDP2 cannot cut a 0-dim parameter; it is replicated and its gradient averaged like that of an
    ignored module.
    """
    modules = dict(model.named_modules())
    named = [modules[name] for name in config.fsdp.ignored_modules if name in modules]
    scalars = [p for p in model.parameters() if p.ndim == 0]
    if not scalars:
        return named
    return [*named, nn.ParameterList(scalars)]


def names_within(model: nn.Module, modules: Sequence[nn.Module]) -> set[str]:
    """Names of the model's parameters that these modules hold."""
    held = {id(p) for module in modules for p in module.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in held}


def make_contiguous(model: nn.Module, *, sharded: bool) -> None:
    """Store parameters contiguously where that is needed, values kept.

    FSDP2 refuses others; elsewhere a layout without gaps or overlaps, as channels_last, stays.
    """
    for parameter in model.parameters():
        is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        if not parameter.is_contiguous() and (sharded or not is_dense):
            parameter.data = parameter.data.contiguous()


def widen_masters(model: nn.Module, config: AcceleratorConfig) -> None:
    """Under mixed precision every trainable parameter is kept in fp32, on every kind.

    accelerate does so where it shards; a model that was loaded in bf16 would otherwise be updated
    in bf16 on one process and under DDP, and lose most small updates.
    """
    if config.mixed_precision == "no":
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.float()


def optimizer_problems(model: nn.Module, optimizer: Optimizer) -> Iterator[Problem]:
    """Whether the optimizer holds exactly the model's trainable parameters."""
    known = {id(p) for p in model.parameters()}
    held: set[int] = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            held.add(id(parameter))
            if id(parameter) not in known:
                yield Problem(
                    f"optimizer.param_groups[{index}]",
                    f"holds a parameter of shape {list(parameter.shape)} that does not belong "
                    "to the model.",
                    "Build the optimizer from model.parameters(), after the model is final.",
                )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trainable.items() if id(p) not in held]
    if missing:
        shown = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        yield Problem(
            "optimizer",
            f"does not hold {len(missing)} trainable parameters: {shown}.",
            "Give them to the optimizer, or freeze them (requires_grad_(False)).",
        )


def _state_problems(optimizer: Optimizer) -> Iterator[Problem]:
    """State that is made in the constructor belongs to whole parameters, not to shards."""
    if optimizer.state:
        yield Problem(
            "optimizer",
            f"({type(optimizer).__name__}) has state for {len(optimizer.state)} parameters before "
            "the first step: it would stay with the unsharded ones.",
            "Give a function that builds it from the sharded model: "
            f"lambda model: {type(optimizer).__name__}(model.parameters(), ...).",
        )


def _precision_problems(
    config: AcceleratorConfig, topology: Topology, device: torch.device
) -> Iterator[Problem]:
    if config.mixed_precision != "fp16":
        return
    if topology.is_sharded:
        yield Problem(
            "accelerator.mixed_precision",
            "= fp16 with parallelism.dp_shard > 1: the loss scaler does not work on shards.",
            f"Use {option('mixed_precision', 'bf16')}.",
        )
    elif device.type == "cpu":
        yield Problem(
            "accelerator.mixed_precision",
            "= fp16 on CPU, where it is not available.",
            f"Use {option('mixed_precision', 'bf16 or no')}.",
        )


def _compile_problems(config: AcceleratorConfig, topology: Topology) -> Iterator[Problem]:
    if not config.compile.enable:
        return
    backend, mode = config.compile.backend, config.compile.mode
    if backend != "inductor":
        # Importing dynamo takes a second, which only a run that asks for another backend pays.
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            yield Problem(
                "accelerator.compile.backend",
                f"= {backend!r} is not a backend of torch.compile here; it has: "
                f"{', '.join(known)}.",
                nearest(backend, known) or f"Use {option('compile.backend', 'inductor')}.",
            )
    elif mode != "default" and topology.is_sharded:
        yield Problem(
            "accelerator.compile.mode",
            f"= {mode} with parallelism.dp_shard > 1: it replays CUDA graphs, which read weights "
            "at fixed addresses, and a unit's weights are gathered to new ones each time.",
            f"Use {option('compile.mode', 'default')}.",
        )


def _ignored_problems(model: nn.Module, config: AcceleratorConfig) -> Iterator[Problem]:
    names = {name for name, _ in model.named_modules() if name}
    for wanted in config.fsdp.ignored_modules:
        if wanted not in names:
            yield Problem(
                "accelerator.fsdp.ignored_modules",
                f"= {list(config.fsdp.ignored_modules)}, but {wanted!r} is not a module of the "
                "model.",
                nearest(wanted, names),
            )


def _unit_problems(model: nn.Module, config: AcceleratorConfig) -> Iterator[Problem]:
    """Who names the units, and whether each parameter belongs to one of them alone."""
    try:
        units = wrap_units(model, resolve_wrap_policy(model, config.fsdp))
    except ConfigError as error:
        yield from error.problems
        return
    whole = {id(p) for module in ignored_modules(model, config) for p in module.parameters()}
    unit_names = {id(module): name for name, module in units.items()}
    homes: dict[int, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in whole:
            unit = _innermost(model, name, unit_names)
            homes.setdefault(id(parameter), {}).setdefault(unit, name)
    if config.mixed_precision == "no":  # otherwise all masters are widened to fp32
        yield from _dtype_problems(model, unit_names, whole)
    for home in homes.values():
        if len(home) > 1:
            shown = ", ".join(f"{name} in {unit or 'the root'}" for unit, name in home.items())
            yield Problem(
                "model",
                f"ties one parameter across wrap units ({shown}): a unit gathers and frees its "
                "parameters by itself.",
                "Name the class of a module that holds them all "
                f"with {option('fsdp.wrap_modules')}, keep them out of units, or leave one of the "
                f"modules whole with {option('fsdp.ignored_modules')}.",
            )


def _dtype_problems(
    model: nn.Module, unit_names: Mapping[int, str], whole: Container[int]
) -> Iterator[Problem]:
    """FSDP2 keeps the trainable parameters of a unit in one piece of memory, of one dtype."""
    found: dict[str, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in whole:
            dtypes = found.setdefault(_innermost(model, name, unit_names), {})
            dtypes.setdefault(parameter.dtype, name)
    for unit, dtypes in found.items():
        if len(dtypes) > 1:
            shown = [f"{n} is {str(d).removeprefix('torch.')}" for d, n in dtypes.items()]
            yield Problem(
                f"model.{unit}" if unit else "model",
                f"holds trainable parameters of {len(dtypes)} dtypes in one wrap unit"
                f"{'' if unit else ' (the root)'}: {', '.join(shown)}.",
                "Give them one dtype (model.float()) and compute in another one with "
                f"{option('mixed_precision')}; or make the other module a wrap unit with "
                f"{option('fsdp.wrap_modules')} or leave it whole with "
                f"{option('fsdp.ignored_modules')}.",
            )


def _memory_problems(model: nn.Module) -> Iterator[Problem]:
    """Accelerate finds the optimizer's parameters by their addresses, which must therefore differ.

    Parameters without an element all lie at address 0.
    """
    homes: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.requires_grad:
            continue
        other = homes.setdefault(parameter.data_ptr(), name)
        if other != name:
            yield Problem(
                f"model.{name}",
                f"lies at the same address as {other}: sharding would make two parameters of "
                "them, and the optimizer would lose one.",
                "Give it its own memory (nn.Parameter(x.clone())), make both the same "
                "nn.Parameter, or freeze it.",
            )


def _innermost(model: nn.Module, parameter: str, unit_names: Mapping[int, str]) -> str:
    """Name of the unit that a parameter belongs to; empty for the root."""
    module, found = model, ""
    for part in parameter.split(".")[:-1]:
        module = module.get_submodule(part)
        found = unit_names.get(id(module), found)
    return found


def verify_sharded(
    model: nn.Module, optimizer: Optimizer | None, units: Iterable[str], replicated: set[str]
) -> None:
    """Prove that sharding happened: at these units, and every parameter but `replicated` is cut.

    Raises:
        RuntimeError: a module is not a unit, a parameter is still whole, or the optimizer lost one.
    """
    sharded = {fqn(model, name) for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    missing = sorted(set(units) - sharded)
    if missing:
        raise RuntimeError(f"prepare made no units of {missing[:10]}, only of {sorted(sharded)}")
    whole = [
        name
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) and name not in replicated
    ]
    if whole:
        raise RuntimeError(f"prepare left {len(whole)} parameters unsharded: {whole[:10]}")
    if optimizer is None:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lost = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if lost:
        raise RuntimeError(f"prepare took {len(lost)} parameters from the optimizer: {lost[:10]}")
