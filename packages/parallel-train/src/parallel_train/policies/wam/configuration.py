"""WAMConfig: presets and sizes of the world-action model; torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from parallel_config import Problem
from parallel_config.errors import report
from parallel_train.policies.base import PolicyConfig

Mode = Literal["mean_std", "min_max", "identity"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a preset."""

    n_layers: int
    n_heads: int
    head_dim: int
    """Every stream attends with n_heads x head_dim numbers per token."""
    width: int
    """Of the context and world streams."""
    action_width: int
    """Of the action stream."""


PRESETS = {
    "tiny": Sizes(n_layers=4, n_heads=4, head_dim=32, width=128, action_width=128),
    "100m": Sizes(n_layers=12, n_heads=8, head_dim=64, width=512, action_width=384),
    "1b": Sizes(n_layers=20, n_heads=12, head_dim=96, width=1152, action_width=768),
    "6b": Sizes(n_layers=28, n_heads=20, head_dim=128, width=2560, action_width=1280),
}
"""By name; the number is the count of parameters, roughly."""


@dataclass(frozen=True, kw_only=True)
class WAMConfig(PolicyConfig):
    """World-action model: one flow carries noise to future observations and actions at once."""

    model_class: ClassVar[str] = "parallel_train.policies.wam.modeling:WAMPolicy"

    preset: Literal["tiny", "100m", "1b", "6b"] = "tiny"
    """Sizes of the transformer; the fields below change single ones."""
    n_layers: int | None = None
    """Mixture-of-transformers layers; None is the preset's."""
    n_heads: int | None = None
    """Attention heads, shared by all streams; None is the preset's."""
    head_dim: int | None = None
    """Width of a head; None is the preset's."""
    width: int | None = None
    """Width of the context and world streams; None is the preset's."""
    action_width: int | None = None
    """Width of the action stream; None is the preset's."""
    chunk_size: int = 16
    """Actions predicted at once, one per frame of the dataset."""
    n_action_steps: int | None = None
    """Actions of a chunk that are executed before the next prediction; None executes all."""
    world: tuple[str, ...] = ("observation.state",)
    """Observation vectors that are read, and whose future is predicted."""
    world_frames: int = 4
    """Future frames of the world that are predicted."""
    world_stride: int = 4
    """Frames of the dataset between two of them."""
    world_weight: float = 0.5
    """Weight of the world's error beside the actions'."""
    text_bytes: int = 48
    """Bytes of the task's text that are read; the rest is cut off."""
    num_flow_steps: int = 10
    """Euler steps from noise to actions at inference."""
    state_normalization: Mode = "mean_std"
    """How observation vectors are normalized."""
    action_normalization: Mode = "mean_std"
    """How actions are normalized."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "world", tuple(self.world))
        report(self._problems())

    @property
    def sizes(self) -> Sizes:
        """The preset's sizes with the fields that were given."""
        names = ("n_layers", "n_heads", "head_dim", "width", "action_width")
        preset = PRESETS[self.preset]
        given = {name: getattr(self, name) for name in names}
        return Sizes(
            **{n: getattr(preset, n) if value is None else value for n, value in given.items()}
        )

    @property
    def executed(self) -> int:
        """Actions of a chunk that are executed before the next prediction."""
        return self.chunk_size if self.n_action_steps is None else self.n_action_steps

    def delta_timestamps(self, fps: float) -> dict[str, list[float]]:
        """The chunk of actions; of the world this frame and the predicted ones."""
        future = [i * self.world_stride / fps for i in range(self.world_frames + 1)]
        return {
            "action": [i / fps for i in range(self.chunk_size)],
            **dict.fromkeys(self.world, future),
        }

    def normalization(self) -> dict[str, str]:
        """Normalization mode by prefix of the feature's name."""
        return {"observation.": self.state_normalization, "action": self.action_normalization}

    def _problems(self) -> Iterator[Problem]:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                yield _problem(name, f"= {value}, but it is at least 1.", "1 or more")
        if self.preset not in PRESETS:
            yield _problem("preset", f"= {self.preset!r} is unknown.", " or ".join(PRESETS))
        if not self.world:
            yield _problem("world", "= [] names no observation.", "observation.state")
        if self.n_action_steps is not None and self.n_action_steps > self.chunk_size:
            yield _problem(
                "n_action_steps",
                f"= {self.n_action_steps} exceeds policy.chunk_size = {self.chunk_size}.",
                f"{self.chunk_size} or less",
            )
        if not (math.isfinite(self.world_weight) and self.world_weight >= 0):
            yield _problem("world_weight", f"= {self.world_weight}, but it is at least 0.", "0.5")


_POSITIVE = (
    "n_layers",
    "n_heads",
    "head_dim",
    "width",
    "action_width",
    "chunk_size",
    "n_action_steps",
    "world_frames",
    "world_stride",
    "text_bytes",
    "num_flow_steps",
)


def _problem(name: str, message: str, use: str) -> Problem:
    return Problem(f"policy.{name}", message, f"Use --policy.{name} {use}.")
