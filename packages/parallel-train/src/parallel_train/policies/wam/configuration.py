"""WAMConfig: presets and sizes of the world-action model; torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from parallel_config import Problem
from parallel_config.errors import report
from parallel_train.data.spec import DataSpec
from parallel_train.policies.base import PolicyConfig, repeated_names

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
    image_size: int
    """Height and width that pictures are scaled to."""
    patch_size: int
    """Height and width of a patch; each is a token."""


PRESETS = {
    "tiny": Sizes(
        n_layers=4,
        n_heads=4,
        head_dim=32,
        width=128,
        action_width=128,
        image_size=64,
        patch_size=16,
    ),
    "100m": Sizes(
        n_layers=12,
        n_heads=8,
        head_dim=64,
        width=512,
        action_width=384,
        image_size=128,
        patch_size=16,
    ),
    "1b": Sizes(
        n_layers=20,
        n_heads=12,
        head_dim=96,
        width=1152,
        action_width=768,
        image_size=224,
        patch_size=16,
    ),
    "6b": Sizes(
        n_layers=28,
        n_heads=20,
        head_dim=128,
        width=2560,
        action_width=1280,
        image_size=224,
        patch_size=16,
    ),
}
"""By name; the number is the count of parameters, roughly."""

# What large transformers are trained with: a peak that falls with the size, a warm-up, and a second
# moment that forgets faster. `tiny` takes the run's own defaults.
RUN_DEFAULTS: dict[str, dict[str, object]] = {
    "tiny": {},
    **{
        name: {
            "steps": steps,
            "optimizer.lr": lr,
            "optimizer.betas": (0.9, 0.95),
            "optimizer.weight_decay": 0.01,
            "scheduler.warmup_steps": warmup_steps,
            "scheduler.min_lr_ratio": 0.1,
        }
        for name, steps, lr, warmup_steps in (
            ("100m", 20_000, 3e-4, 500),
            ("1b", 50_000, 2e-4, 1_000),
            ("6b", 100_000, 1e-4, 2_000),
        )
    },
}
"""Of a run, by preset: paths in its config and their values."""


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
    image_size: int | None = None
    """Height and width that pictures are scaled to, whatever their shape; None is the preset's."""
    patch_size: int | None = None
    """Height and width of a patch, which is a token; it divides image_size. None is the
    preset's."""
    chunk_size: int = 16
    """Actions predicted at once, one per frame of the dataset."""
    n_action_steps: int | None = None
    """Actions of a chunk that are executed before the next prediction; None executes all."""
    world: tuple[str, ...] = ("observation.state",)
    """Observation vectors that are read, and whose future is predicted. Latents that another model
    has made of pictures are such vectors too."""
    cameras: tuple[str, ...] = ()
    """Cameras that the policy sees, by feature name (observation.images.top); empty: vectors
    alone."""
    predict_cameras: bool = True
    """Predict the cameras' future pictures too; otherwise only the present ones are read."""
    world_frames: int = 4
    """Future frames of the world that are predicted."""
    world_stride: int = 4
    """Frames of the dataset between two of them."""
    world_weight: float = 0.5
    """Weight of the vectors' error beside the actions'."""
    camera_weight: float = 0.1
    """Weight of the pictures' error beside the actions'."""
    text_bytes: int = 48
    """Bytes of the task's text that are read; the rest is cut off."""
    num_flow_steps: int = 10
    """Euler steps from noise to actions at inference."""
    state_normalization: Mode = "mean_std"
    """How observation vectors are normalized."""
    image_normalization: Mode = "mean_std"
    """How pictures are normalized, after they are scaled to [0, 1]."""
    action_normalization: Mode = "mean_std"
    """How actions are normalized."""

    def __post_init__(self) -> None:
        # The dataclass is frozen; a caller may give lists.
        object.__setattr__(self, "world", tuple(self.world))
        object.__setattr__(self, "cameras", tuple(self.cameras))
        report(self._problems())

    @property
    def sizes(self) -> Sizes:
        """The preset's sizes with the fields that were given."""
        preset = PRESETS[self.preset]
        given = {field.name: getattr(self, field.name) for field in fields(preset)}
        return Sizes(
            **{n: getattr(preset, n) if value is None else value for n, value in given.items()}
        )

    @property
    def executed(self) -> int:
        """Actions of a chunk that are executed before the next prediction."""
        return self.chunk_size if self.n_action_steps is None else self.n_action_steps

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Videos of the dataset that are decoded for this policy."""
        return self.cameras

    @property
    def predicted_cameras(self) -> tuple[str, ...]:
        """Cameras whose future is predicted."""
        return self.cameras if self.predict_cameras else ()

    def delta_timestamps(self, fps: float) -> dict[str, list[float]]:
        """The chunk of actions; of the world this frame and the predicted ones."""
        # + 1: the first is the present frame, which the context reads.
        future = [i * self.world_stride / fps for i in range(self.world_frames + 1)]
        return {
            "action": [i / fps for i in range(self.chunk_size)],
            **{name: list(future) for name in (*self.world, *self.predicted_cameras)},
        }

    def normalization(self) -> dict[str, str]:
        """Normalization mode by prefix of the feature's name."""
        # By full name, which is the longest prefix: it wins over "observation.".
        cameras = dict.fromkeys(self.cameras, str(self.image_normalization))
        modes = {"observation.": self.state_normalization, "action": self.action_normalization}
        return {**modes, **cameras}

    def knows_task_numbers(self, num_tasks: int) -> bool:
        """A task is its text: a resumed run may meet others, or the same by other numbers."""
        return False

    def reads(self, name: str) -> bool:
        """Whether a vector of that name is read."""
        return name == "action" or name in self.world

    def new_run_problems(self) -> Iterator[Problem]:
        """Problems of a new run. Models that were trained so are still loaded and resumed."""
        strange = [name for name in self.world if not name.startswith("observation.")]
        if strange:
            yield Problem(
                "policy.world",
                f"names {', '.join(map(repr, strange))}, but a name must begin with observation.: "
                "no other feature is checked and normalized.",
                f"Use --dataset.rename {strange[0]}=observation.{strange[0]}, and that name.",
            )

    def data_problems(self, spec: DataSpec) -> Iterator[Problem]:
        """Problems of a new run with data: tasks that become one, since their texts are cut off."""
        limit = self.text_bytes
        # Sorted: texts that begin alike stand side by side.
        texts = sorted({task.encode() for task in spec.tasks})
        alike = [(a, b) for a, b in itertools.pairwise(texts) if a[:limit] == b[:limit]]
        if alike:
            names = " and ".join(repr(text.decode()) for text in alike[0])
            yield _problem(
                "text_bytes",
                f"= {limit}, but the tasks {names} are the same up to there: the policy could not "
                "tell them apart.",
                f"{max(_first_difference(a, b) for a, b in alike) + 1} or more",
            )

    def run_defaults(self) -> dict[str, object]:
        """Learning rate, schedule and length that go with the preset."""
        return dict(RUN_DEFAULTS[self.preset])

    def _problems(self) -> Iterator[Problem]:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                yield _problem(name, f"= {value}, but it must be at least 1.", "1 or more")
        if self.preset not in PRESETS:
            yield _problem("preset", f"= {self.preset!r} is unknown.", " or ".join(PRESETS))
        yield from repeated_names("world", self.world)
        yield from repeated_names("cameras", self.cameras)
        if not self.world:
            yield _problem("world", "= [] does not name an observation.", "observation.state")
        if self.n_action_steps is not None and self.n_action_steps > self.chunk_size:
            yield _problem(
                "n_action_steps",
                f"= {self.n_action_steps} exceeds policy.chunk_size = {self.chunk_size}.",
                f"{self.chunk_size} or less",
            )
        for name, use in (("world_weight", "0.5"), ("camera_weight", "0.1")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                yield _problem(name, f"= {value}, but it must be at least 0.", use)
        yield from self._picture_problems()

    def _picture_problems(self) -> Iterator[Problem]:
        if self.preset not in PRESETS:
            return
        size, patch = self.sizes.image_size, self.sizes.patch_size
        # A patch of 0 is reported above, and % would fail on it.
        if patch >= 1 and size % patch:
            yield _problem(
                "patch_size",
                f"= {patch} does not divide policy.image_size = {size}.",
                # The largest smaller patch that fits; 1 always does.
                f"{max(n for n in range(1, patch) if size % n == 0)}",
            )


_POSITIVE = (
    "n_layers",
    "n_heads",
    "head_dim",
    "width",
    "action_width",
    "image_size",
    "patch_size",
    "chunk_size",
    "n_action_steps",
    "world_frames",
    "world_stride",
    "text_bytes",
    "num_flow_steps",
)


def _first_difference(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _problem(name: str, message: str, use: str) -> Problem:
    return Problem(f"policy.{name}", message, f"Use --policy.{name} {use}.")
