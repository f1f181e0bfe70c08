"""Wrap units and declared entry points: what a model says about how it may be cut.

A wrap unit is a module whose parameters are gathered and freed together. The user's
`wrap_modules` come first, then `min_num_params`, then the model's own `_fsdp_wrap_modules`; a model
without any is an error, since sharding the root alone saves no memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from parallel_config import AcceleratorConfig, ConfigError, FSDPConfig, Problem
from parallel_config.errors import nearest
from parallel_engine.fqns import fqn
from parallel_engine.options import option

log = logging.getLogger("parallel_engine")


@dataclass(frozen=True)
class WrapPolicy:
    """Which modules become wrap units: by class name, or by size."""

    class_names: tuple[str, ...] = ()
    min_num_params: int | None = None
    source: str = ""
    """Where the decision comes from: a field path, or the model's class."""


def resolve_wrap_policy(model: nn.Module, config: FSDPConfig) -> WrapPolicy:
    """Decide the wrap units of `model`; works on a meta model and without ranks.

    Raises:
        ConfigError: no wrap units are named, a class does not exist in the model, or nothing
            matches.
    """
    if config.wrap_modules is not None:
        policy = WrapPolicy(config.wrap_modules, source="accelerator.fsdp.wrap_modules")
    elif config.min_num_params is not None:
        policy = WrapPolicy(
            min_num_params=config.min_num_params, source="accelerator.fsdp.min_num_params"
        )
    else:
        policy = _declared(model)
    _check(model, policy)
    return policy


def wrap_units(model: nn.Module, policy: WrapPolicy) -> dict[str, nn.Module]:
    """The modules below the root that become units, by FQN.

    By size a module becomes a unit when its parameters, those of units inside it left out, are
    enough. A module without parameters has nothing to gather, so it never becomes one.
    """
    below = {name: m for name, m in model.named_modules() if name and _num_params(m) > 1}
    if policy.min_num_params is None:
        return {name: m for name, m in below.items() if type(m).__name__ in policy.class_names}
    units: dict[str, nn.Module] = {}
    taken: set[int] = set()
    for name, module in reversed(
        below.items()
    ):  # inner modules first: they take their parameters out
        left = [p for p in module.parameters() if id(p) not in taken]
        if runs(module) and sum(p.numel() for p in left) >= policy.min_num_params:
            units[name] = module
            taken.update(map(id, left))
    return {name: module for name, module in below.items() if name in units}


def unit_sizes(model: nn.Module) -> dict[str, int]:
    """Parameters of each unit of a sharded model, those of units in it left out; root is ""."""
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    sizes = {fqn(model, name): 0 for name in units}
    for name, parameter in model.named_parameters():
        owner = max((u for u in units if not u or name.startswith(f"{u}.")), key=len)
        sizes[fqn(model, owner)] += parameter.numel()
    return sizes


def log_units(model: nn.Module, source: str) -> None:
    """Log names and sizes of the units of a sharded model, and where the choice comes from."""
    sizes = unit_sizes(model)
    shown = [f"{name or '(root)'} {size:,}" for name, size in sizes.items()]
    more = " ..." if len(shown) > 20 else ""
    listed = "; ".join(shown[:20]) + more
    log.info("%d wrap units (%s), with their parameters: %s", len(sizes), source, listed)


def units_without_shards(model: nn.Module, config: AcceleratorConfig) -> dict[str, nn.Module]:
    """Units for checkpointing and compiling where nothing is sharded.

    Raises:
        ConfigError: checkpointing or compiling is asked for, and no wrap units are named.
    """
    if config.activation_checkpointing.mode == "none" and not config.compile.enable:
        return {}
    return wrap_units(model, resolve_wrap_policy(model, config.fsdp))


def forward_methods(model: nn.Module) -> tuple[str, ...]:
    """Entry points beside `forward` that the model declares in `_fsdp_forward_methods`.

    Raises:
        ConfigError: a declared name is not a method of the model.
    """
    names = tuple(getattr(model, "_fsdp_forward_methods", ()))
    for name in names:
        if not callable(getattr(model, name, None)):
            methods = [m for m in dir(type(model)) if not m.startswith("_")]
            raise ConfigError(
                Problem(
                    f"{type(model).__name__}._fsdp_forward_methods",
                    f"= {list(names)}, but {name!r} is not a method of the model.",
                    nearest(name, methods),
                )
            )
    return names


def _declared(model: nn.Module) -> WrapPolicy:
    owner = type(model).__name__
    names: Sequence[str] = getattr(model, "_fsdp_wrap_modules", None) or ()
    if not names:
        raise ConfigError(
            Problem(
                "accelerator.fsdp.wrap_modules",
                f"= None, and {owner} does not declare _fsdp_wrap_modules: only the root would be "
                "sharded, which does not save memory.",
                f"Use {option('fsdp.wrap_modules')} with one of: {_class_list(model)}.",
            )
        )
    return WrapPolicy(tuple(names), source=f"{owner}._fsdp_wrap_modules")


def _check(model: nn.Module, policy: WrapPolicy) -> None:
    if policy.min_num_params is not None:
        if not wrap_units(model, policy):
            below = [m for name, m in model.named_modules() if name and runs(m)]
            largest = max((_num_params(m) for m in below), default=0)
            raise ConfigError(
                Problem(
                    policy.source,
                    f"= {policy.min_num_params} does not match any module; the largest below the "
                    f"root has {largest} parameters.",
                    f"Use {option('fsdp.min_num_params', f'{largest} or less')}.",
                )
            )
        return
    present = _classes(model)
    for name in policy.class_names:
        if name not in present:
            raise ConfigError(
                Problem(
                    policy.source,
                    f"= {list(policy.class_names)}, but the model does not contain a module of "
                    f"class {name!r}.",
                    f"{nearest(name, present)} It has: {_class_list(model)}.".strip(),
                )
            )
    units = wrap_units(model, policy)
    if not units:
        raise ConfigError(
            Problem(
                policy.source,
                f"= {list(policy.class_names)}, but modules of these classes do not hold "
                "parameters.",
                "Name the classes of the modules that hold most of them.",
            )
        )
    for name, module in units.items():
        if not runs(module):
            raise ConfigError(
                Problem(
                    policy.source,
                    f"= {list(policy.class_names)}, but {name} is a {type(module).__name__}, a "
                    "container without a forward, so FSDP2 cannot gather its parts.",
                    "Name the class of the modules in it.",
                )
            )


def runs(module: nn.Module) -> bool:
    """Whether the module has a forward: FSDP2 refuses plain lists and dicts of modules."""
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return not is_container or type(module).forward is not nn.Module.forward


def _num_params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@contextlib.contextmanager
def only_with_size(model: nn.Module, units: Iterable[nn.Module] | None) -> Iterator[None]:
    """While accelerate shards, by size: every module but these counts as empty; None changes none.

    Its size policy looks at `parameters()` alone. Its own choices are not ours: of a class name it
    takes the first class that bears it, and all subclasses; by size it takes the ModuleList around
    the blocks, which FSDP2 refuses, and modules of which nothing is left.
    """
    chosen = {id(module) for module in units or ()}
    below = [m for name, m in model.named_modules() if name]
    hidden = [m for m in below if units is not None and id(m) not in chosen]
    for module in hidden:
        module.parameters = lambda recurse=True: iter(())
    try:
        yield
    finally:
        for module in hidden:
            del module.parameters


def _classes(model: nn.Module) -> list[str]:
    return sorted({type(m).__name__ for name, m in model.named_modules() if name})


def _class_list(model: nn.Module) -> str:
    return ", ".join(_classes(model))


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP; any other as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def reshard(model: nn.Module) -> None:
    """Free what is gathered of a sharded model, so that the shards are its parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def param_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 gathers and reduces at once; a unit usually has one."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # torch 2.11 knows one group per unit
    return [] if group is None else [group]
