"""Names (FQNs) of a wrapped model's parts, as the user's own model spells them.

DDP, `torch.compile` and activation checkpointing put a part of their own into names. Only the class
of a module says which part that is: a user's own child may have the same name.
"""

from __future__ import annotations

from torch import nn

# By name: importing torch's compiler to look at its class would take seconds.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module"
    ),
}


def fqn(model: nn.Module, name: str) -> str:
    """The name of a module, parameter or buffer of `model`, without what wrappers put into it."""
    kept, module = [], model
    for part in name.split(".") if name else ():
        added = _added_child(module)
        if part == added:
            module = module.get_submodule(part)
            continue
        kept.append(part)
        if added is not None:  # a checkpointed root gives names without its own part
            module = module.get_submodule(added)
        found = module._modules.get(part)
        module = nn.Module() if found is None else found  # a tensor, which is the last part
    return ".".join(kept)


def _added_child(module: nn.Module) -> str | None:
    """Name of the child that a wrapper stands in for; None where the module is not a wrapper."""
    for base in type(module).__mro__:
        if (child := _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            return child
    return None
