"""Reads a trained policy from a checkpoint, a folder or the Hub, ready to act."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel_ckpt import StepFolder, resolve_checkpoint
from parallel_ckpt.load.weights import load_weights_alone
from parallel_config.codec import parse, read_config_text
from parallel_publish.bundle import refuse_damage
from parallel_publish.pretrained import find_pretrained, require_safetensors
from parallel_train.data.spec import DataSpec
from parallel_train.policies.base import PolicyConfig
from parallel_train.policies.factory import build_policy
from parallel_train.policies.pretrained import read_policy_document
from parallel_train.policies.processors import Preprocessor


@dataclass(frozen=True)
class LoadedPolicy:
    """A model in evaluation mode with what surrounds it.

    Batches are raw, as the dataset gives them: observation vectors [B, width], pictures uint8
    [B, 3, height, width], `task_index` [B].
    """

    model: nn.Module
    preprocessor: Preprocessor
    spec: DataSpec
    config: PolicyConfig

    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        """The action [B, width] to execute now, in the dataset's units. Once per frame."""
        model: Any = self.model
        action: Tensor = model.select_action(self.preprocessor(batch, self._device))
        return self.preprocessor.postprocessor()(action)

    def predict_success(self, batch: dict[str, Tensor]) -> Tensor:
        """Of a reward model: probability [B] that the task is solved."""
        model: Any = self.model
        success: Tensor = model.predict_success(self.preprocessor(batch, self._device))
        return success

    def reset(self) -> None:
        """Begin a new episode."""
        model: Any = self.model
        if hasattr(model, "reset"):
            model.reset()

    def example_batch(self) -> dict[str, Tensor]:
        """A batch of one frame, all zeros, with everything that the policy may read."""
        batch = {name: torch.zeros(1, w) for name, w in self.spec.observation_vectors().items()}
        for name in self.config.camera_names:
            height, width, channels = self.spec.cameras()[name]
            batch[name] = torch.zeros(1, channels, height, width, dtype=torch.uint8)
        stored = {new: old for old, new in self.preprocessor.rename.items()}
        # In raw batches features have the dataset's names.
        batch = {stored.get(name, name): value for name, value in batch.items()}
        return {**batch, "task_index": torch.zeros(1, dtype=torch.long)}

    @property
    def _device(self) -> torch.device | None:
        return next((param.device for param in self.model.parameters()), None)


def load_policy(
    path: str | Path,
    policy_type: str | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
) -> LoadedPolicy:
    """Build a trained policy and fill it with its weights. No collective: a process reads alone.

    `path` is anything that names a checkpoint, a folder with `config.json` and weights, or a
    repository on the Hub (`user/name`, of which `revision` is a branch, tag or commit). A policy
    that was trained by path (`my_package.module:MyPolicy`) is built only if `policy_type` repeats
    that path, since importing it runs its code. The model of a checkpoint is compared with its
    checksums; what lies elsewhere has none.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or its policy is not registered
            here.
        PublishError: the repository cannot be fetched.
    """
    folder = _find(path, revision, token)
    # Only a folder inside of a committed checkpoint has a manifest to compare it with.
    step = StepFolder(folder.resolve().parent)
    if step.is_committed and folder.resolve() == step.pretrained_model:
        refuse_damage(step, "full")
    # config.json first: a wrong policy type must show before the weights are read.
    text, _ = read_config_text(folder / "config.json")
    config, spec = read_policy_document(
        parse(text, source=str(folder)),
        source=str(folder / "config.json"),
        policy_type=policy_type,
    )
    model = build_policy(config, spec)
    load_weights_alone(model, folder)
    return LoadedPolicy(model.eval(), Preprocessor.from_pretrained(folder), spec, config)


def _find(path: str | Path, revision: str | None, token: str | None) -> Path:
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        require_safetensors(folder, str(path))
        return folder
    if folder.exists():
        return StepFolder(resolve_checkpoint(folder)).pretrained_model
    return find_pretrained(path, revision=revision, token=token)
