"""Parameter names as the user's own model spells them (FQNs), whatever wraps it."""

from __future__ import annotations

_CLASSES = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}
# The names of torch.compile, of activation checkpointing and of FSDP1, in this order.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def added_child(wrapper: type) -> str | None:
    """Name of the child that a module of this class stands in for; None if it is not a wrapper.

    Classes are known by name, because importing torch's compiler to ask for its class takes
    seconds. A user's own child may have any name: where there is a module, ask its class.
    """
    for base in wrapper.__mro__:
        if (child := _CLASSES.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            return child
    return None


def clean_fqn(name: str, *, under_ddp: bool = False) -> str:
    """Drop the segments that DDP, `torch.compile` and activation checkpointing put into a name.

    `module.` is dropped only in front and only with `under_ddp`, because a user's own model may
    have a child of that name.

    >>> clean_fqn("module._orig_mod.blocks.0._checkpoint_wrapped_module.weight", under_ddp=True)
    'blocks.0.weight'
    """
    segments = [part for part in name.split(".") if part not in _WRAPPERS]
    if under_ddp and len(segments) > 1 and segments[0] == "module":
        segments = segments[1:]
    return ".".join(segments)
