"""What is done to each wrap unit before it is sharded: checkpointing, then compiling."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel_config import ActivationCheckpointingConfig, CompileConfig

log = logging.getLogger("parallel_engine")


def checkpoint_units(
    model: nn.Module, units: Mapping[str, nn.Module], config: ActivationCheckpointingConfig
) -> None:
    """Recompute the activations of units in the backward pass.

    Every unit with mode full; with mode selective one in `config.every`, the first included.
    Switches off the key-value caches of transformers' decoders.
    """
    if config.mode == "none":
        return
    _switch_off_caches(model)
    stride = 1 if config.mode == "full" else config.every
    for index, (name, unit) in enumerate(units.items()):
        if index % stride == 0:
            _replace(model, name, checkpoint_wrapper(unit))


def compile_units(units: Mapping[str, nn.Module], config: CompileConfig) -> None:
    """Compile each unit's forward by itself: units of one class share the compiled code.

    The forward alone, not the call around it: that also runs the hooks which gather a unit's
    weights, where every graph would break, and `fullgraph` fail.
    """
    if not config.enable:
        return
    mode = config.mode if config.backend == "inductor" else None
    for unit in units.values():
        unit.forward = torch.compile(
            unit.forward,
            backend=config.backend,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
            mode=mode,
        )


def _switch_off_caches(model: nn.Module) -> None:
    """Set `config.use_cache = False` where a module has it on, as transformers' decoders do.

    Each layer appends its keys and values to the cache of the forward pass. The recomputation would
    append them a second time and so attend to twice as many.
    """
    switched: dict[int, str] = {}  # by config: the modules of one model share it
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", None) is True:
            config.use_cache = False
            switched[id(config)] = type(module).__name__
    if switched:
        log.warning(
            "config.use_cache of %s is False from here on: activation checkpointing "
            "(AcceleratorConfig.activation_checkpointing) computes layers a second time, which "
            "would grow their key-value cache. generate() has a switch of its own and still "
            "caches.",
            ", ".join(sorted(set(switched.values()))),
        )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(owner, (nn.ModuleList, nn.Sequential)) and child.isdigit():
        owner[int(child)] = module
    elif isinstance(owner, nn.ModuleDict):
        owner[child] = module
    else:
        setattr(owner, child, module)
