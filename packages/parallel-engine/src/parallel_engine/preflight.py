"""What must hold before anything is wrapped; every problem is found at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel_config import AcceleratorConfig, ConfigError, Problem, Topology
from parallel_config.errors import nearest


def check(
    model: nn.Module,
    optimizer: Optimizer,
    config: AcceleratorConfig,
    topology: Topology,
    device: torch.device,
) -> None:
    """Check everything that can be known before wrapping.

    Raises:
        ConfigError: every problem, with names and the way out.
    """
    problems = [
        *_optimizer_problems(model, optimizer, topology),
        *_precision_problems(config, topology, device),
        *_ignored_problems(model, config),
    ]
    if problems:
        raise ConfigError(problems)


def ignored_modules(model: nn.Module, config: AcceleratorConfig) -> list[nn.Module]:
    """Modules whose parameters stay whole: those that the config names, and 0-dim parameters.

    FSDP2 cannot cut a 0-dim parameter; it is replicated and its gradient averaged like that of an
    ignored module.
    """
    named = [model.get_submodule(name) for name in config.fsdp.ignored_modules]
    scalars = [p for p in model.parameters() if p.ndim == 0]
    if not scalars:
        return named
    return [*named, nn.ParameterList(scalars)]


def make_contiguous(model: nn.Module) -> None:
    """Store every parameter contiguously, values kept: FSDP2 and safetensors refuse others."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _optimizer_problems(
    model: nn.Module, optimizer: Optimizer, topology: Topology
) -> Iterator[Problem]:
    known = {id(p) for p in model.parameters()}
    held: set[int] = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            held.add(id(parameter))
            if id(parameter) not in known:
                yield Problem(
                    f"optimizer.param_groups[{index}]",
                    f"holds a parameter of shape {list(parameter.shape)} that is none of the "
                    "model's.",
                    "Build the optimizer from model.parameters(), after the model is final.",
                )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trainable.items() if id(p) not in held]
    if missing:
        shown = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        yield Problem(
            "optimizer",
            f"lacks {len(missing)} trainable parameters: {shown}.",
            "Give them to the optimizer, or freeze them (requires_grad_(False)).",
        )
    if topology.is_sharded and optimizer.state:
        yield Problem(
            "optimizer",
            f"({type(optimizer).__name__}) has state for {len(optimizer.state)} parameters before "
            "the first step: it would stay with the unsharded ones.",
            "Use an optimizer that makes its state in step(), such as AdamW or SGD.",
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
            "Use --accelerator.mixed_precision bf16.",
        )
    elif device.type == "cpu":
        yield Problem(
            "accelerator.mixed_precision",
            "= fp16 on CPU, where it is not available.",
            "Use --accelerator.mixed_precision bf16 or no.",
        )


def _ignored_problems(model: nn.Module, config: AcceleratorConfig) -> Iterator[Problem]:
    names = {name for name, _ in model.named_modules() if name}
    for wanted in config.fsdp.ignored_modules:
        if wanted not in names:
            yield Problem(
                "accelerator.fsdp.ignored_modules",
                f"= {list(config.fsdp.ignored_modules)}, but the model has no module {wanted!r}.",
                nearest(wanted, names),
            )


def verify_sharded(model: nn.Module, optimizer: Optimizer, replicated: set[str]) -> None:
    """Prove that sharding happened: every parameter but `replicated` is cut.

    Raises:
        RuntimeError: some parameter is still whole, or the optimizer lost one.
    """
    whole = [
        name
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) and name not in replicated
    ]
    if whole:
        raise RuntimeError(f"prepare left {len(whole)} parameters unsharded: {whole[:10]}")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lost = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if lost:
        raise RuntimeError(f"prepare took {len(lost)} parameters from the optimizer: {lost[:10]}")
