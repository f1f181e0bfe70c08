"""RewardModel: a residual network that tells solved frames from others.

Shape suffixes: B batch, D model width, W width of all observation vectors together, S tokens of
all pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_config import ConfigError, Problem
from parallel_train.data.spec import NUMBERS, DataSpec, Feature
from parallel_train.policies.pretrained import PretrainedPolicy
from parallel_train.policies.reward.configuration import RewardConfig
from parallel_train.policies.transformer import Attention
from parallel_train.policies.vision import ImageTokens, require_cameras

Batch = Mapping[str, Tensor]


class RewardBlock(nn.Module):
    """A normalized two-layer network beside a skip connection."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Returns [B, D]."""
        change_BD: Tensor = self.down(self.dropout(F.gelu(self.up(self.norm(x_BD)))))
        return x_BD + change_BD


class Glance(nn.Module):
    """What matters in the pictures: a learned question that attends to their tokens."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__()
        self.image = ImageTokens(
            config.vision_backbone, config.vision_weights, config.dim_model, len(config.cameras)
        )
        self.attention = Attention(config.dim_model, 1, 0.0)
        self.question = nn.Parameter(torch.empty(1, 1, config.dim_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the question."""
        nn.init.normal_(self.question)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """From one [B, 3, height, width] per camera to [B, D]."""
        seen = [self.image(image, camera) for camera, image in enumerate(images)]
        # Of every camera [B, places, D]; S counts those of all.
        tokens_BSD = torch.cat([tokens + position for tokens, position in seen], dim=1)
        question_B1D = self.question.expand(len(tokens_BSD), -1, -1)
        # [B, 1, D] -> [B, D]
        answer_BD: Tensor = self.attention(question_B1D, tokens_BSD, tokens_BSD)[:, 0]
        return answer_BD


class RewardModel(PretrainedPolicy):
    """Probability that the task is solved in a frame.

    Batches are normalized: observation vectors [B, width], pictures of `config.cameras`
    [B, 3, height, width], `task_index` [B]; in training also the label [B] or, without one,
    `action_is_pad` [B, 1]. With cameras the dataset may be without vectors.

    Raises:
        ConfigError: the observation vector, a camera or the label is missing in the dataset.
    """

    _fsdp_wrap_modules: tuple[str, ...] = ("RewardBlock",)
    _fsdp_forward_methods: ClassVar[list[str]] = ["predict_success"]

    def __init__(self, config: RewardConfig, spec: DataSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.names = _inputs(config, spec)
        numbered = config.knows_task_numbers(len(spec.tasks))
        width = sum(spec.dim(name) for name in self.names)
        self.observation = nn.Linear(width, config.dim_model) if self.names else None
        require_cameras(spec, config.cameras)
        self.glance = Glance(config) if config.cameras else None
        if self.glance is not None:
            # On this instance alone: without cameras the class has no such unit.
            self._fsdp_wrap_modules += self.glance.image.wrap_modules
        self.task = nn.Embedding(len(spec.tasks), config.dim_model) if numbered else None
        self.blocks = nn.ModuleList(
            RewardBlock(config.dim_model, config.dropout) for _ in range(config.n_layers)
        )
        self.norm = nn.LayerNorm(config.dim_model)
        self.to_logit = nn.Linear(config.dim_model, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Binary cross-entropy, a 0-dim mean over the frames, and how the labels fare.

        `accuracy` counts all frames alike; `solved` is the fraction of them that is labelled so.
        """
        logit_B, label_B = self._logits(batch), self._labels(batch)
        weight = logit_B.new_tensor(self.config.positive_weight)
        loss = F.binary_cross_entropy_with_logits(logit_B, label_B, pos_weight=weight)
        # Logit 0 is probability 1/2.
        accuracy = ((logit_B > 0) == (label_B > 0.5)).float().mean()
        return loss, {"accuracy": accuracy.detach(), "solved": label_B.mean()}

    @torch.no_grad()
    def predict_success(self, batch: Batch) -> Tensor:
        """Probability [B] that the task is solved; read it in eval mode."""
        return self._logits(batch).sigmoid()

    def load_pretrained(self) -> None:
        """Fetch `config.vision_weights`, if any; `ptrain train` does it for a new run.

        Raises:
            ConfigError: they cannot be fetched.
        """
        if self.glance is not None:
            self.glance.image.load_pretrained()

    @staticmethod
    def loss_weight(batch: Batch) -> Tensor:
        """Samples of the batch: each has one label, whose mean is the loss."""
        return torch.tensor(len(next(iter(batch.values()))))

    def _logits(self, batch: Batch) -> Tensor:
        parts: list[Tensor] = []
        if self.observation is not None:
            # [B, width] of each vector -> [B, W]
            x_BW = torch.cat([batch[name] for name in self.names], dim=-1)
            parts.append(self.observation(x_BW))
        if self.glance is not None:
            parts.append(self.glance([batch[name] for name in self.config.cameras]))
        if self.task is not None:
            parts.append(self.task(batch["task_index"]))
        # Vectors, pictures and task add up, so that any of them may be missing.
        x_BD = torch.stack(parts).sum(dim=0)
        for block in self.blocks:
            x_BD = block(x_BD)
        # [B, D] -> [B, 1] -> [B]
        logit_B: Tensor = self.to_logit(self.norm(x_BD)).squeeze(-1)
        return logit_B

    def _labels(self, batch: Batch) -> Tensor:
        found = batch["action_is_pad" if self.config.label is None else self.config.label]
        # Padding at the horizon says that the episode ends before it: the frame is solved. A label
        # is [B] or [B, 1].
        return found.reshape(len(found), -1)[:, -1].float()


def _check_label(name: str, feature: Feature) -> None:
    """One number per frame; whether it lies in [0, 1] is checked on the frames."""
    if feature.dtype in NUMBERS and math.prod(feature.shape) == 1:
        return
    raise ConfigError(
        Problem(
            "policy.label",
            f"= {name!r} is {feature.dtype} of shape {list(feature.shape)}, but a label is one "
            "number per frame: 1 or true where the task is solved, else 0.",
            "Use --policy.label with such a feature, or None for the ends of the demonstrations.",
        )
    )


def _inputs(config: RewardConfig, spec: DataSpec) -> tuple[str, ...]:
    """The observation vectors, without a label that is called observation itself."""
    if config.label is not None and config.label not in spec.features:
        raise ConfigError(
            Problem(
                "policy.label",
                f"= {config.label!r} is not a feature of the dataset.",
                f"It has: {', '.join(sorted(spec.features))}.",
            )
        )
    if config.label is not None:
        _check_label(config.label, spec.features[config.label])
    names = tuple(name for name in spec.observation_vectors() if name != config.label)
    if not (names or config.cameras):
        raise ConfigError(
            Problem(
                "dataset.root",
                ": a float vector named observation.* is missing, but the model reads one.",
                f"The dataset has: {', '.join(sorted(spec.features))}.",
            )
        )
    return names
