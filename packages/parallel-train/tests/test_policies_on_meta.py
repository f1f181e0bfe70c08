"""Policies that are built without memory get the values that they would have had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel_engine import initialize, parameters_on_meta
from parallel_engine.materialize import allocate, require_filled
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.base import PolicyConfig
from parallel_train.policies.factory import build_policy
from parallel_train.policies.reward.configuration import RewardConfig
from parallel_train.policies.wam.configuration import WAMConfig

TOP = "observation.images.top"
SPEC = DataSpec(
    10,
    {
        "observation.state": Feature("float32", (4,)),
        TOP: Feature("video", (64, 64, 3)),
        "action": Feature("float32", (2,)),
    },
    ("open", "close"),
)
SMALL: dict[str, PolicyConfig] = {
    "act": ACTConfig(dim_model=16, n_heads=2, dim_feedforward=32, chunk_size=4),
    "reward": RewardConfig(dim_model=16),
    "wam": WAMConfig(width=32, action_width=16, n_heads=2, head_dim=8, n_layers=2, cameras=(TOP,)),
}


def from_meta(config: PolicyConfig, where: Any) -> nn.Module:
    with where:
        model = build_policy(config, SPEC)
    assert all(parameter.is_meta for parameter in model.parameters())
    allocate(model, torch.device("cpu"))
    torch.manual_seed(0)
    initialize(model)
    require_filled(model)
    return model


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("buffers", ["computed", "lost"])
def test_values_are_those_of_a_model_that_was_built_in_memory(name: str, buffers: str) -> None:
    torch.manual_seed(0)
    whole = build_policy(SMALL[name], SPEC)
    where = parameters_on_meta() if buffers == "computed" else torch.device("meta")
    model = from_meta(SMALL[name], where)
    for tensors in ("named_parameters", "named_buffers"):
        expected = dict(getattr(whole, tensors)())
        found = dict(getattr(model, tensors)())
        assert list(found) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=key)
