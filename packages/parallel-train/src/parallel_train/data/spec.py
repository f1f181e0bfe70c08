"""Describes a dataset to a model: features, rate, tasks. Plain data, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_config import ConfigError, Problem

ACTION = "action"
STATE = "observation.state"
_VECTOR_DTYPES = ("float32", "float64")
NUMBERS = (
    *_VECTOR_DTYPES,
    "float16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "bool",
)
"""Dtypes of the columns that are read; others, such as strings, stay on the disk."""


def is_learned(name: str) -> bool:
    """Whether a feature of that (policy's) name is an action or an observation."""
    return name == ACTION or name.startswith("observation.")


@dataclass(frozen=True)
class Feature:
    """One column of a dataset."""

    dtype: str
    """float32, int64, video ..."""
    shape: tuple[int, ...]
    """Shape of one frame's value; images are [height, width, channels]."""
    names: tuple[str, ...] | None = None
    """Name of each entry, where the dataset gives them."""

    @property
    def is_vector(self) -> bool:
        """Whether a frame's value is a list of numbers."""
        return self.dtype in _VECTOR_DTYPES and len(self.shape) == 1

    @property
    def is_image(self) -> bool:
        """Whether a frame's value is a picture."""
        return self.dtype in ("video", "image")


@dataclass(frozen=True)
class DataSpec:
    """Shapes and names that a policy is built for; saved with the model."""

    fps: float
    """Frames per second."""
    features: Mapping[str, Feature]
    """By name."""
    tasks: tuple[str, ...] = field(default=())
    """Text of each task, by `task_index`."""

    def dim(self, name: str) -> int:
        """Width of the vector feature `name`.

        Raises:
            ConfigError: the feature is missing, or it is not a vector.
        """
        feature = self.features.get(name)
        if feature is not None and feature.is_vector:
            return feature.shape[0]
        found = "is missing"
        if feature is not None:
            found = f"is {feature.dtype} of shape {list(feature.shape)}"
        raise ConfigError(
            Problem(
                "dataset.root",
                f": feature {name!r} {found}, but the policy needs a float vector of that name.",
                f"The dataset has: {', '.join(sorted(self.features))}. "
                f"To read one with another name, use --dataset.rename OLD={name}.",
            )
        )

    def observation_vectors(self) -> dict[str, int]:
        """Width of every observation vector, by name, sorted."""
        return {
            name: feature.shape[0]
            # Sorted: datasets list features in any order, and weights are tied to one.
            for name, feature in sorted(self.features.items())
            if name.startswith("observation.") and feature.is_vector
        }

    def cameras(self) -> dict[str, tuple[int, ...]]:
        """Shape [height, width, channels] of every camera, by name, sorted."""
        return {
            name: feature.shape
            for name, feature in sorted(self.features.items())
            if name.startswith("observation.") and feature.is_image
        }

    def renamed(self, rename: Mapping[str, str]) -> DataSpec:
        """The same features under the names that `rename` gives them."""
        features = {rename.get(name, name): feature for name, feature in self.features.items()}
        return DataSpec(self.fps, features, self.tasks)

    def to_plain(self) -> dict[str, Any]:
        """The same as JSON values."""
        features = {
            name: {
                "dtype": feature.dtype,
                "shape": list(feature.shape),
                "names": None if feature.names is None else list(feature.names),
            }
            for name, feature in self.features.items()
        }
        return {"fps": self.fps, "features": features, "tasks": list(self.tasks)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DataSpec:
        """Read what `to_plain` wrote."""
        features = {
            name: Feature(
                entry["dtype"],
                tuple(entry["shape"]),
                None if entry["names"] is None else tuple(entry["names"]),
            )
            for name, entry in plain["features"].items()
        }
        return cls(plain["fps"], features, tuple(plain["tasks"]))
