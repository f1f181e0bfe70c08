"""The base of every policy's config. It is torch-free, so that configs parse without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from parallel_config import Problem


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Base of every policy's config. `type` in files and flags names the registered policy.

    A subclass is a frozen dataclass, best in a module that does not import torch. Its fields
    become flags (`--policy.<field>`), the docstring under a field its help.
    """

    model_class: ClassVar[str] = ""
    """Path of the model's class, its module and its name with a colon between them. The model is
    built as `Class(config, spec)`, where `spec` is the dataset's `DataSpec`. The path may stay
    empty where the policy is named by its model, whose `config_class` is this class."""

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Videos of the dataset that are decoded for this policy."""
        return ()

    def delta_timestamps(self, fps: float) -> dict[str, list[float]]:
        """Seconds relative to the sampled frame at which each feature is read, by feature.

        A feature that is not named is read at the frame itself, without a time axis.
        """
        return {}

    def normalization(self) -> dict[str, str]:
        """Normalization mode ("mean_std", "min_max", "identity") by feature or its prefix.

        The longest prefix that matches a feature's name decides; other features stay as they are.
        """
        return {}

    def run_defaults(self) -> dict[str, object]:
        """What a run of this policy takes for values that neither a flag nor a file gives.

        By path in the run's config, such as `optimizer.lr`. A resumed run keeps its own.
        """
        return {}


def repeated_names(field: str, names: Sequence[str]) -> Iterator[Problem]:
    """A problem of `policy.<field>` where it names a feature twice: it would be read twice."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        yield Problem(
            f"policy.{field}",
            f"names {', '.join(map(repr, repeated))} more than once.",
            f"Use --policy.{field} {' '.join(dict.fromkeys(names))}.",
        )
