"""RewardModel: a residual network that tells solved frames from others.

Shape suffixes: B batch, D model width, W width of all observation vectors together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_config import ConfigError, Problem
from parallel_train.data.spec import DataSpec
from parallel_train.policies.pretrained import PretrainedPolicy
from parallel_train.policies.reward.configuration import RewardConfig

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


class RewardModel(PretrainedPolicy):
    """Probability that the task is solved in a frame.

    Batches are normalized: observation vectors [B, width], `task_index` [B]; in training also the
    label [B] or, without one, `action_is_pad` [B, 1].

    Raises:
        ConfigError: the dataset has no observation vector, or no such label.
    """

    _fsdp_wrap_modules: ClassVar[list[str]] = ["RewardBlock"]
    _fsdp_forward_methods: ClassVar[list[str]] = ["predict_success"]

    def __init__(self, config: RewardConfig, spec: DataSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.names = _inputs(config, spec)
        several = config.use_task and len(spec.tasks) > 1
        width = sum(spec.dim(name) for name in self.names)
        self.observation = nn.Linear(width, config.dim_model)
        self.task = nn.Embedding(len(spec.tasks), config.dim_model) if several else None
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
        accuracy = ((logit_B > 0) == (label_B > 0.5)).float().mean()
        return loss, {"accuracy": accuracy.detach(), "solved": label_B.mean()}

    @torch.no_grad()
    def predict_success(self, batch: Batch) -> Tensor:
        """Probability [B] that the task is solved; read it in eval mode."""
        return self._logits(batch).sigmoid()

    def _logits(self, batch: Batch) -> Tensor:
        x_BW = torch.cat([batch[name] for name in self.names], dim=-1)
        x_BD = self.observation(x_BW)
        if self.task is not None:
            x_BD = x_BD + self.task(batch["task_index"])
        for block in self.blocks:
            x_BD = block(x_BD)
        logit_B: Tensor = self.to_logit(self.norm(x_BD)).squeeze(-1)
        return logit_B

    def _labels(self, batch: Batch) -> Tensor:
        found = batch["action_is_pad" if self.config.label is None else self.config.label]
        return found.reshape(len(found), -1)[:, -1].float()


def _inputs(config: RewardConfig, spec: DataSpec) -> tuple[str, ...]:
    """The observation vectors, without a label that is called observation itself."""
    if config.label is not None and config.label not in spec.features:
        raise ConfigError(
            Problem(
                "policy.label",
                f"= {config.label!r} is no feature of the dataset.",
                f"It has: {', '.join(sorted(spec.features))}.",
            )
        )
    names = tuple(name for name in spec.observation_vectors() if name != config.label)
    if not names:
        raise ConfigError(
            Problem(
                "dataset.root",
                ": there is no float vector named observation.*, but the model reads one.",
                f"The dataset has: {', '.join(sorted(spec.features))}.",
            )
        )
    return names
