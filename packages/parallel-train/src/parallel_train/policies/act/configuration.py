"""ACTConfig: sizes and losses of the ACT policy; torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from parallel_config import Problem
from parallel_config.errors import report
from parallel_train.policies.base import PolicyConfig, repeated_names

Mode = Literal["mean_std", "min_max", "identity"]


@dataclass(frozen=True, kw_only=True)
class ACTConfig(PolicyConfig):
    """Action chunking with transformers: a conditional VAE that predicts a chunk of actions."""

    model_class: ClassVar[str] = "parallel_train.policies.act.modeling:ACTPolicy"

    chunk_size: int = 16
    """Actions predicted at once, one per frame of the dataset."""
    n_action_steps: int | None = None
    """Actions of a chunk that are executed before the next prediction; None executes all."""
    temporal_ensemble: float | None = None
    """Predict at every step and average the overlapping chunks with weights exp(-m i), i = 0 the
    oldest; this is m (the paper uses 0.01). None executes chunks one after another."""
    dim_model: int = 128
    """Width of the transformer."""
    n_heads: int = 4
    """Attention heads; they divide dim_model."""
    dim_feedforward: int = 512
    """Width of the feed-forward layers."""
    n_encoder_layers: int = 2
    """Layers of the encoder that reads the observation."""
    n_decoder_layers: int = 2
    """Layers of the decoder that writes the actions."""
    use_vae: bool = True
    """Train with the variational encoder; without it the style variable is always 0."""
    n_vae_layers: int = 2
    """Layers of the variational encoder, which reads the demonstrated actions."""
    latent_dim: int = 16
    """Size of the style variable z."""
    kl_weight: float = 10.0
    """Weight of the KL term beside the L1 error of the actions."""
    dropout: float = 0.1
    """Dropout in every transformer layer."""
    use_task: bool = True
    """Give the model a learned token per task, where the dataset has more than one."""
    cameras: tuple[str, ...] = ()
    """Cameras that the policy sees, by feature name (observation.images.top); empty: the state
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
    action_normalization: Mode = "mean_std"
    """How actions are normalized."""

    def __post_init__(self) -> None:
        # The dataclass is frozen; a caller may give a list.
        object.__setattr__(self, "cameras", tuple(self.cameras))
        report(self._problems())

    @property
    def executed(self) -> int:
        """Actions of a chunk that are executed before the next prediction."""
        return self.chunk_size if self.n_action_steps is None else self.n_action_steps

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Videos of the dataset that are decoded for this policy."""
        return self.cameras

    def delta_timestamps(self, fps: float) -> dict[str, list[float]]:
        """Actions of the frame itself and of the `chunk_size - 1` frames after it."""
        return {"action": [i / fps for i in range(self.chunk_size)]}

    def normalization(self) -> dict[str, str]:
        """Normalization mode by prefix of the feature's name."""
        # By full name, which is the longest prefix: it wins over "observation.".
        cameras = dict.fromkeys(self.cameras, str(self.image_normalization))
        modes = {"observation.": self.state_normalization, "action": self.action_normalization}
        return {**modes, **cameras}

    def knows_task_numbers(self, num_tasks: int) -> bool:
        """Whether a model for that many tasks learns what each number of a task stands for."""
        return self.use_task and num_tasks > 1

    def _problems(self) -> Iterator[Problem]:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                yield _problem(
                    name, f"= {getattr(self, name)}, but it must be at least 1.", "1 or more"
                )
        yield from repeated_names("cameras", self.cameras)
        # 0 heads are reported above and divide nothing.
        if self.n_heads >= 1 and self.dim_model % self.n_heads:
            yield Problem(
                "policy.n_heads",
                f"= {self.n_heads} does not divide policy.dim_model = {self.dim_model}.",
                f"Use --policy.n_heads {self._nearest_heads()}.",
            )
        # Position codes are pairs of a sine and a cosine.
        if self.dim_model % 2:
            yield _problem(
                "dim_model", f"= {self.dim_model}, but it must be even.", "an even number"
            )
        if self.n_action_steps is not None and not 1 <= self.n_action_steps <= self.chunk_size:
            yield Problem(
                "policy.n_action_steps",
                f"= {self.n_action_steps} lies outside 1..policy.chunk_size = {self.chunk_size}.",
                "Use a number in that range, or None for the whole chunk.",
            )
        yield from self._number_problems()

    def _number_problems(self) -> Iterator[Problem]:
        if not 0 <= self.dropout < 1:
            yield _problem("dropout", f"= {self.dropout} lies outside [0, 1).", "0.1")
        if not 0 <= self.kl_weight < float("inf"):
            yield _problem("kl_weight", f"= {self.kl_weight}, but it must be at least 0.", "10")
        m = self.temporal_ensemble
        if m is None:
            return
        # "not <" and not ">=": NaN is refused too. A negative m is allowed: it prefers new chunks.
        if not abs(m) < float("inf"):
            yield _problem("temporal_ensemble", f"= {m} is not finite.", "0.01")
        if self.n_action_steps not in (None, 1):
            yield Problem(
                "policy.temporal_ensemble",
                f"= {m} predicts at every step, but policy.n_action_steps = {self.n_action_steps}.",
                "Use one of the two.",
            )

    def _nearest_heads(self) -> int:
        # dim_model may itself be wrong here: every problem is reported at once.
        divisors = [n for n in range(1, max(1, self.dim_model) + 1) if self.dim_model % n == 0]
        return min(divisors or [1], key=lambda n: abs(n - self.n_heads))


_POSITIVE = (
    "chunk_size",
    "dim_model",
    "n_heads",
    "dim_feedforward",
    "n_encoder_layers",
    "n_decoder_layers",
    "n_vae_layers",
    "latent_dim",
)


def _problem(name: str, message: str, use: str) -> Problem:
    return Problem(f"policy.{name}", message, f"Use --policy.{name} {use}.")
