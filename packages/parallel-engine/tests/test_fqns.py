"""A name loses what a wrapper has put into it, and nothing that is the user's own."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel_engine.fqns import fqn
from parallel_engine.same_on_ranks import _described

OWN = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "block")


def odd_model():
    """Children that are called as wrappers call theirs, each with one of the same name in it."""
    inner = {name: nn.ModuleDict({name: nn.Linear(2, 2)}) for name in OWN}
    return nn.ModuleDict(inner)


@pytest.mark.parametrize(
    "wrap", [lambda m: m, checkpoint_wrapper, lambda m: torch.compile(m, backend="eager")]
)
def test_names_of_wrapped_children_are_those_of_the_bare_model(wrap):
    model = odd_model()
    bare = {id(tensor): name for name, tensor in model.named_parameters()}
    for name in OWN:
        model[name][name] = wrap(model[name][name])
        model[name] = wrap(model[name])
    found = {id(tensor): fqn(model, name) for name, tensor in model.named_parameters()}
    assert found == bare
    assert len(set(_described(model))) == len(bare)


def test_a_root_that_is_wrapped():
    bare = list(dict(odd_model().named_parameters()))
    root = torch.compile(odd_model(), backend="eager")
    assert [fqn(root, name) for name, _ in root.named_parameters()] == bare
    checkpointed = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2)))
    assert [fqn(checkpointed, n) for n, _ in checkpointed.named_parameters()] == [
        "0.weight",
        "0.bias",
    ]
    assert fqn(root, "") == ""
