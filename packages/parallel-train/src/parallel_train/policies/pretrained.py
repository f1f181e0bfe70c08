"""Gives policies their `save_pretrained` and `from_pretrained("user/name")`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

from parallel_config import ConfigError, Problem
from parallel_config.codec import Schema
from parallel_publish import PreTrainedModel
from parallel_publish.pretrained import CONFIG
from parallel_train.data.spec import DataSpec
from parallel_train.policies.base import PolicyConfig
from parallel_train.policies.factory import policy_class, policy_json
from parallel_train.policies.registry import POLICIES


class PretrainedPolicy(PreTrainedModel):
    """Base of the policies here: built from a config and the `DataSpec` it was trained for.

    Your own policy may derive from it, but it does not have to: checkpoints, publishing and
    `load_policy` only need an `nn.Module`. `PretrainedPolicy.from_pretrained` itself gives the
    registered policy that was saved.
    """

    config: Any
    spec: DataSpec

    def config_document(self) -> dict[str, Any]:
        """What `config.json` holds: type, fields and the data that the model was built for."""
        document: dict[str, Any] = json.loads(policy_json(self.config, self.spec))
        return document

    @classmethod
    def from_config_document(cls, document: Mapping[str, Any], **overrides: Any) -> Self:
        """Build the policy with fresh weights; `overrides` replace fields of its config.

        Raises:
            ConfigError: the document is another policy's, or that of one not registered here.
        """
        config, spec = read_policy_document(document, source="config.json")
        owner = policy_class(config)
        if not (issubclass(cls, owner) or cls is PretrainedPolicy):
            raise ConfigError(
                Problem(
                    "config.json",
                    f"is of the policy {POLICIES.name_of(config)!r}, so {cls.__name__} cannot be "
                    "built from it.",
                    f"Use {owner.__name__}.from_pretrained, or load_policy.",
                )
            )
        built: Any = owner if cls is PretrainedPolicy else cls
        model: Self = built(dataclasses.replace(config, **overrides), spec)
        return model


def read_policy_document(
    document: Mapping[str, Any], *, source: str, policy_type: str | None = None
) -> tuple[PolicyConfig, DataSpec]:
    """Config and data of a `config.json`.

    Raises:
        ConfigError: it is not such a document, or its policy is neither registered here nor what
            the user repeats as `policy_type`.
    """
    fields = dict(document)
    try:
        name, spec = fields.pop("type"), DataSpec.from_plain(fields.pop("data"))
    except (KeyError, TypeError) as error:
        raise ConfigError(
            Problem(source, f"does not describe a policy: {error!r} is missing or wrong.")
        ) from error
    # A class by path is imported only if the user repeats the path: importing runs its code.
    cls = POLICIES.resolve(name, trusted=name == policy_type)
    schema: Schema[PolicyConfig] = Schema(cls, version=1)
    try:
        return schema.from_document(fields, source=source, trusted=False).config, spec
    except ConfigError as error:  # no key is left out here: it may change what the model computes
        way = Problem(
            CONFIG, ": a newer release may have written it.", "Upgrade the packages then."
        )
        raise ConfigError([*error.problems, way], source=source) from None
