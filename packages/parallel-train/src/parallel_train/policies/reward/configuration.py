"""RewardConfig: sizes and labels of the success classifier; torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from parallel_config import Problem
from parallel_config.errors import report
from parallel_train.policies.base import PolicyConfig, repeated_names

Mode = Literal["mean_std", "min_max", "identity"]


@dataclass(frozen=True, kw_only=True)
class RewardConfig(PolicyConfig):
    """A success classifier: is the task solved in this frame?"""

    model_class: ClassVar[str] = "parallel_train.policies.reward.modeling:RewardModel"

    label: str | None = None
    """Feature of the dataset that is 1 (or true) in solved frames. None takes the demonstrations
    as solved at their ends: a frame is solved if its episode ends within `horizon_s`."""
    horizon_s: float = 0.125
    """Seconds before the end of an episode in which the task counts as solved (without `label`).
    The episodes of the embedded dataset go on for 0.125 s after they are solved."""
    dim_model: int = 128
    """Width of the network."""
    n_layers: int = 2
    """Residual blocks."""
    dropout: float = 0.1
    """Dropout in every block."""
    positive_weight: float = 1.0
    """Weight of solved frames in the loss; above 1 where they are rare and must not be missed."""
    use_task: bool = True
    """Tell the model which task it is, where the dataset has more than one."""
    cameras: tuple[str, ...] = ()
    """Cameras that the model sees, by feature name (observation.images.top); empty: the vectors
    alone. Needs the extra "vision"."""
    vision_backbone: Literal["resnet18", "resnet34"] = "resnet18"
    """Network that reads the pictures, shared by all cameras."""
    vision_weights: str | None = None
    """Pretrained weights by torchvision's name, such as IMAGENET1K_V1, fetched when a run starts
    afresh; None starts from random ones."""
    state_normalization: Mode = "mean_std"
    """How observation vectors are normalized."""
    image_normalization: Mode = "mean_std"
    """How pictures are normalized, after they are scaled to [0, 1]."""

    def __post_init__(self) -> None:
        # The dataclass is frozen; a caller may give a list.
        object.__setattr__(self, "cameras", tuple(self.cameras))
        report(self._problems())

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Videos of the dataset that are decoded for this model."""
        return self.cameras

    def delta_timestamps(self, fps: float) -> dict[str, list[float]]:
        """Without a label: whether an action at the horizon is still inside of the episode."""
        if self.label is not None:
            return {}
        # At least one frame ahead: at 0 no action would ever lie outside of the episode.
        return {"action": [max(1, round(self.horizon_s * fps)) / fps]}

    def normalization(self) -> dict[str, str]:
        """Observations only: labels stay as they are."""
        modes = {"observation.": str(self.state_normalization)}
        # By full name, which is the longest prefix: it wins over "observation.".
        modes |= dict.fromkeys(self.cameras, str(self.image_normalization))
        return modes if self.label is None else {**modes, self.label: "identity"}

    def value_ranges(self) -> dict[str, tuple[float, float]]:
        """Between which values a feature must lie, by name; checked when a run starts."""
        return {} if self.label is None else {self.label: (0.0, 1.0)}

    def knows_task_numbers(self, num_tasks: int) -> bool:
        """Whether a model for that many tasks learns what each number of a task stands for."""
        return self.use_task and num_tasks > 1

    def reads(self, name: str) -> bool:
        """Whether a vector of that name is read, where the dataset has it."""
        # The answer must not be read: a label may be named observation.* too.
        return name.startswith("observation.") and name != self.label

    def _problems(self) -> Iterator[Problem]:
        for name in ("dim_model", "n_layers"):
            if getattr(self, name) < 1:
                yield _problem(
                    name, f"= {getattr(self, name)}, but it must be at least 1.", "1 or more"
                )
        yield from repeated_names("cameras", self.cameras)
        # Only position codes of pictures need pairs of a sine and a cosine.
        if self.cameras and self.dim_model % 2:
            yield _problem(
                "dim_model", f"= {self.dim_model}, but it must be even.", "an even number"
            )
        if not 0 <= self.dropout < 1:
            yield _problem("dropout", f"= {self.dropout} lies outside [0, 1).", "0.1")
        for name in ("horizon_s", "positive_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                yield _problem(
                    name, f"= {value}, but it must be a positive number.", "such a number"
                )


def _problem(name: str, message: str, use: str) -> Problem:
    return Problem(f"policy.{name}", message, f"Use --policy.{name} {use}.")
