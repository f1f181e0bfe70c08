"""Names (FQNs) of a wrapped model's parts, as the user's own model spells them.

DDP, `torch.compile` and activation checkpointing put a part of their own into names. Only the class
of a module says which part that is: a user's own child may have the same name.
"""

from __future__ import annotations

from torch import nn

from parallel_config.names import added_child


def fqn(model: nn.Module, name: str) -> str:
    """The name of a module, parameter or buffer of `model`, without what wrappers put into it."""
    kept, module = [], model
    for part in name.split(".") if name else ():
        added = added_child(type(module))
        if part == added:
            module = module.get_submodule(part)
            continue
        kept.append(part)
        if added is not None:  # a checkpointed root gives names without its own part
            module = module.get_submodule(added)
        found = module._modules.get(part)
        module = nn.Module() if found is None else found  # a tensor, which is the last part
    return ".".join(kept)
