"""The policy itself: an nn.Module that is built from its config and the dataset's spec."""

import torch
from torch import Tensor, nn

from my_policies.configuration import MLPConfig
from parallel_train.data.spec import ACTION, STATE, DataSpec


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class MLPPolicy(nn.Module):
    config_class = MLPConfig
    _fsdp_wrap_modules = ("Block",)
    _fsdp_forward_methods = ("predict_action_chunk",)

    def __init__(self, config: MLPConfig, spec: DataSpec) -> None:
        super().__init__()
        self.chunk = config.chunk_size, spec.dim(ACTION)
        self.observation = nn.Linear(spec.dim(STATE), config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.n_layers))
        self.to_actions = nn.Linear(config.width, self.chunk[0] * self.chunk[1])
        self._queue: list[Tensor] = []

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        error = (self.predict_action_chunk(batch) - batch[ACTION]).square().mean(dim=-1)
        valid = ~batch["action_is_pad"]
        loss = (error * valid).sum() / valid.sum().clamp(min=1)
        return loss, {"valid": valid.float().mean().item()}

    @staticmethod
    def loss_weight(batch: dict[str, Tensor]) -> Tensor:
        return (~batch["action_is_pad"]).sum()

    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.observation(batch[STATE])
        for block in self.blocks:
            x = block(x)
        return self.to_actions(x).unflatten(-1, self.chunk)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        if not self._queue:
            self._queue = list(self.predict_action_chunk(batch).unbind(dim=1))
        return self._queue.pop(0)

    def reset(self) -> None:
        self._queue.clear()
