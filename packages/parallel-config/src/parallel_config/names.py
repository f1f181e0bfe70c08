"""Parameter names as the user's own model spells them (FQNs), whatever wraps it."""

from __future__ import annotations

# The names of torch.compile, of activation checkpointing and of FSDP1, in this order.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


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
