"""Declared entry points beside `forward`: the same user code on every kind, in the same precision.

FSDP2 registers a method so that its units gather around it. DDP synchronises gradients only when
its own forward runs, so a declared method is routed through it.

Mixed precision means the same on every kind: autocast around the whole call, which takes its
inputs as they are and gives fp32, so that a loss is computed in fp32 inside and outside. accelerate
does so for `forward` on one process and under DDP; the rest gets it here. Wrap units still compute
in, and hand on, what FSDP2 casts their inputs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel


def prepare_entry_points(
    wrapped: nn.Module,
    model: nn.Module,
    names: Sequence[str],
    *,
    device_type: str,
    autocast_dtype: torch.dtype | None,
) -> None:
    """Make `wrapped.<name>(...)` work for every declared name.

    `wrapped` is what prepare returned, `model` the user's own module in it.
    """
    if isinstance(wrapped, FSDPModule):
        if autocast_dtype is not None:
            _keep_inputs(wrapped)
            for name in ("forward", *names):
                method = getattr(wrapped, name)
                setattr(wrapped, name, _under_autocast(method, device_type, autocast_dtype))
        for name in names:
            register_fsdp_forward_method(wrapped, name)
        # Or a unit that runs before the root's first forward takes itself for the root, for good.
        wrapped._get_fsdp_state()._lazy_init()
        return
    for name in names:
        method = getattr(model, name)
        if autocast_dtype is not None:
            method = _under_autocast(method, device_type, autocast_dtype)
            setattr(model, name, method)
        if isinstance(wrapped, DistributedDataParallel):
            setattr(wrapped, name, _through_forward(wrapped, model, method))


@contextlib.contextmanager
def undeclared_calls_explained(model: nn.Module) -> Iterator[None]:
    """Around code that calls the model.

    Raises:
        RuntimeError: a method that was not declared met shards; says how to declare it.
        AttributeError: the method is missing in DDP's wrapper; says the same.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(model, FSDPModule) or "mixed torch.Tensor and DTensor" not in str(error):
            raise
        owner = type(model).__name__.removeprefix("FSDP")  # fully_shard renames the class
        raise RuntimeError(
            f"{owner}'s sharded parameters were used outside its forward, by a method or by other "
            "code, such as a penalty on weights. Put this code into a method. "
            + _declare(owner, "<method>")
        ) from error
    except AttributeError as error:
        if error.obj is not model or not isinstance(model, DistributedDataParallel):
            raise
        name = error.name or ""
        if not callable(getattr(model.module, name, None)):
            raise
        owner = type(model.module).__name__
        raise AttributeError(
            f"{owner}.{name} was called on DDP's wrapper, which would not reduce its "
            "gradients. " + _declare(owner, name)
        ) from error


def _declare(owner: str, name: str) -> str:
    return (
        f'Name it in {owner}._fsdp_forward_methods = ("{name}",), so that it works on every kind.'
    )


def _keep_inputs(wrapped: FSDPModule) -> None:
    """Let the root's inputs be: FSDP2 would cast targets and times to bf16 with all the rest."""
    state: Any = wrapped._get_fsdp_state()
    state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=False)


def _under_autocast(
    method: Callable[..., Any], device_type: str, dtype: torch.dtype
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            found = method(*args, **kwargs)
        return convert_to_fp32(found)

    return call


def _through_forward(
    wrapped: DistributedDataParallel, model: nn.Module, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Call `method` as DDP's forward: its hooks see the outputs and arm the gradient reduction."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        forward = model.forward

        def once(*inner_args: Any, **inner_kwargs: Any) -> Any:
            model.forward = forward  # the method may call the model itself
            return method(*inner_args, **inner_kwargs)

        model.forward = once
        try:
            return wrapped(*args, **kwargs)
        finally:
            model.forward = forward

    return call
