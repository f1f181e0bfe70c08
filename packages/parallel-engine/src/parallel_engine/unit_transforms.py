"""What is done to each wrap unit before it is sharded: checkpointing, then compiling."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel_config import ActivationCheckpointingConfig, CompileConfig


def checkpoint_units(
    model: nn.Module, units: Mapping[str, nn.Module], config: ActivationCheckpointingConfig
) -> None:
    """Recompute the activations of units in the backward pass.

    Every unit with mode full; with mode selective one in `config.every`, the first included.
    """
    if config.mode == "none":
        return
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


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(owner, (nn.ModuleList, nn.Sequential)) and child.isdigit():
        owner[int(child)] = module
    elif isinstance(owner, nn.ModuleDict):
        owner[child] = module
    else:
        setattr(owner, child, module)
