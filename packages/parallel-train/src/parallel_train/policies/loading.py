"""A trained policy from the files of a checkpoint, ready to act."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from parallel_ckpt import StepFolder, load_weights, resolve_checkpoint
from parallel_config.codec import Schema, parse
from parallel_train.data.spec import DataSpec
from parallel_train.policies.base import PolicyConfig
from parallel_train.policies.factory import build_policy
from parallel_train.policies.registry import POLICIES
from parallel_train.processors import Preprocessor


@dataclass(frozen=True)
class LoadedPolicy:
    """A model in evaluation mode with what surrounds it."""

    model: nn.Module
    preprocessor: Preprocessor
    spec: DataSpec


def load_policy(path: str | Path, policy_type: str | None = None) -> LoadedPolicy:
    """Build the policy of a checkpoint and fill it with its weights.

    `path` is anything that names a checkpoint, or a folder with `config.json` and weights. A
    policy that was trained by path (`my_package.module:MyPolicy`) is built only if `policy_type`
    repeats that path, since importing it runs its code.

    Raises:
        ConfigError: there is no such checkpoint, or its policy is not registered here.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        folder = StepFolder(resolve_checkpoint(path)).pretrained_model
    document = parse((folder / "config.json").read_text(encoding="utf-8"), source=str(folder))
    spec = DataSpec.from_plain(document.pop("data"))
    config = _policy_config(document, str(folder / "config.json"), policy_type)
    model = build_policy(config, spec)
    load_weights(model, folder)
    return LoadedPolicy(model.eval(), Preprocessor.from_pretrained(folder), spec)


def _policy_config(
    document: dict[str, Any], source: str, policy_type: str | None
) -> PolicyConfig:
    """The config section of a `config.json`."""
    name = document.pop("type")
    cls = POLICIES.resolve(name, trusted=name == policy_type)
    schema: Schema[PolicyConfig] = Schema(cls, version=1)
    return schema.from_document(document, source=source, trusted=False).config
