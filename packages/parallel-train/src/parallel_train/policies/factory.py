"""Builds a policy's model from its config, and writes what is saved beside the weights."""

from __future__ import annotations

import importlib
import inspect
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
        ConfigError: the config does not name a model class, what it names is not one or takes other
            arguments, or the dataset does not fit it.
    """
    cls = policy_class(config)
    try:
        # Checked without a call: a TypeError from inside the constructor must keep its own
        # traceback.
        inspect.signature(cls).bind(config, spec)
    except TypeError as error:
        raise _error(
            config, f"{cls.__qualname__} cannot be built as {cls.__name__}(config, spec): {error}."
        ) from None
    model: nn.Module = cls(config, spec)
    return model


def load_pretrained(model: nn.Module) -> None:
    """Fetch what the model's config names as pretrained, for a run that starts afresh.

    A model without a method `load_pretrained` starts as it was built.

    Raises:
        ConfigError: it cannot be fetched.
    """
    fetch = getattr(model, "load_pretrained", None)
    if fetch is not None:
        fetch()


def policy_class(config: PolicyConfig) -> type[nn.Module]:
    """The model class of `config`: by its `model_class`, else the class that the user named.

    Raises:
        ConfigError: the class is missing, cannot be imported, or is not an `nn.Module`.
    """
    # A config that was named by its model has no path of its own: the user's word is the path.
    path = type(config).model_class or POLICIES.path_of(config)
    found = _imported(config, path)
    # The user named the config itself, and it does not say which model it is for.
    if found is type(config):
        raise _error(
            config,
            f"{type(config).__name__}.model_class = '' does not name a model.",
            'Set it to "package.module:Class", or name the model itself and give it '
            f"config_class = {type(config).__name__}.",
        )
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise _error(
            config, f"{path} is {found!r}, which is not a class derived from torch.nn.Module."
        )
    return found


def policy_json(config: PolicyConfig, spec: DataSpec) -> str:
    """Text of `config.json`: type, fields and the data that the model was built for."""
    document = {"type": POLICIES.name_of(config), **to_plain(config), "data": spec.to_plain()}
    return json.dumps(document, indent=2) + "\n"


def _imported(config: PolicyConfig, path: str) -> Any:
    module, _, name = path.partition(":")
    if not (module and name):
        raise _error(
            config,
            f"{type(config).__name__}.model_class = {path!r} does not name a class.",
            'Set it to "package.module:Class".',
        )
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _error(
            config,
            f"{type(config).__name__}.model_class = {path!r} cannot be imported: {error}.",
            "Check the path, and that its package is installed.",
        ) from error
    return found


def _error(config: PolicyConfig, message: str, remedy: str = "") -> ConfigError:
    return ConfigError(Problem("policy.type", f"= {POLICIES.name_of(config)!r}: {message}", remedy))
