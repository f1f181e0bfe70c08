"""From a policy's config to its model, and what is saved beside the weights."""

from __future__ import annotations

import importlib
import json
from typing import Any

from torch import nn

from parallel_config import ConfigError, Problem
from parallel_config.codec import to_plain
from parallel_train.data.spec import DataSpec
from parallel_train.policies.base import PolicyConfig
from parallel_train.policies.registry import POLICIES


def build_policy(config: PolicyConfig, spec: DataSpec) -> nn.Module:
    """The model of `config`, with fresh weights from torch's global generator.

    Raises:
        ConfigError: the config names no model class, or the dataset does not fit it.
    """
    model = policy_class(config)(config, spec)
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem("policy.type", f"builds a {type(model).__name__}, no nn.Module."))
    return model


def policy_class(config: PolicyConfig) -> Any:
    """The model class that `config` names by its `model_class`."""
    path = type(config).model_class
    module, _, name = path.partition(":")
    if not (module and name):
        raise ConfigError(
            Problem(
                "policy.type",
                f"= {POLICIES.name_of(config)!r}: {type(config).__name__}.model_class = {path!r} "
                "names no class.",
                'Set it to "package.module:Class".',
            )
        )
    return getattr(importlib.import_module(module), name)


def policy_json(config: PolicyConfig, spec: DataSpec) -> str:
    """Text of `config.json`: type, fields and the data that the model was built for."""
    document = {"type": POLICIES.name_of(config), **to_plain(config), "data": spec.to_plain()}
    return json.dumps(document, indent=2) + "\n"
