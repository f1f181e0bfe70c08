"""WAMPolicy: flow matching over the future of the world and the actions that lead there.

Three streams attend jointly in mixture-of-transformers layers (Liang et al. 2024):

    context   bytes of the task's text, and the observation now; clean
    world     future observations, on their way from noise to data
    action    the chunk of actions, on the same way at the same time

The flow is the straight line x_t = (1 - t) noise + t data (Lipman et al. 2023); the model predicts
its velocity, data - noise. Context reads only itself; world and action read everything.

Shape suffixes: B batch, F future frames, O width of the observation, T chunk, A action width,
S context tokens, N tokens of all streams, W stream width, C width of the condition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_train.data.spec import ACTION, DataSpec
from parallel_train.policies.chunks import ChunkQueue
from parallel_train.policies.wam.configuration import WAMConfig
from parallel_train.policies.wam.layers import MoTLayer, RMSNorm

Batch = Mapping[str, Tensor]
NO_BYTE = 256
"""Stands where a text is shorter than the longest."""


class ContextTokens(nn.Module):
    """Tokens of the task's text and of the present observation."""

    text_table: Tensor

    def __init__(self, config: WAMConfig, spec: DataSpec, num_numbers: int) -> None:
        super().__init__()
        width = config.sizes.width
        texts = [list(task.encode()[: config.text_bytes]) for task in spec.tasks or ("",)]
        length = max(1, *(len(text) for text in texts))
        table = [text + [NO_BYTE] * (length - len(text)) for text in texts]
        self.register_buffer("text_table", torch.tensor(table), persistent=False)
        self.byte = nn.Embedding(NO_BYTE + 1, width)
        self.text_position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.observation = nn.Linear(num_numbers, width)

    def forward(self, task_B: Tensor, now_BO: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, S, W], and which of them mean something, [B, S]."""
        text_BL = self.text_table[task_B]
        text_BLW = self.byte(text_BL) + self.text_position
        tokens_BSW = torch.cat([self.observation(now_BO)[:, None], text_BLW], dim=1)
        present_B1 = torch.ones_like(text_BL[:, :1], dtype=torch.bool)
        return tokens_BSW, torch.cat([present_B1, text_BL != NO_BYTE], dim=1)


class FlowTime(nn.Module):
    """The flow time in [0, 1] as a condition."""

    def __init__(self, width: int, num_frequencies: int = 64) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.first, self.second = nn.Linear(2 * num_frequencies, width), nn.Linear(width, width)

    def forward(self, time_B: Tensor) -> Tensor:
        """Returns [B, C]."""
        steps = torch.arange(self.num_frequencies, device=time_B.device) / self.num_frequencies
        angle_BF = time_B[:, None] * 1000 * torch.exp(-math.log(10000.0) * steps)
        waves = torch.cat([angle_BF.sin(), angle_BF.cos()], dim=-1)
        # Under sharded mixed precision the weights are narrow here, and the time is not.
        condition_BC: Tensor = self.second(F.silu(self.first(waves.to(self.first.weight.dtype))))
        return condition_BC


class NoisyStream(nn.Module):
    """Into and out of a stream that the flow carries."""

    def __init__(self, num_tokens: int, numbers: int, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(numbers, width)
        self.position = nn.Parameter(torch.randn(num_tokens, width) * 0.02)
        self.norm = RMSNorm(width)
        self.out = nn.Linear(width, numbers)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def embed(self, x: Tensor) -> Tensor:
        """From numbers [B, tokens, numbers] to [B, tokens, W]."""
        embedded: Tensor = self.into(x) + self.position
        return embedded

    def velocity(self, x: Tensor) -> Tensor:
        """From [B, tokens, W] to a velocity [B, tokens, numbers]."""
        velocity: Tensor = self.out(self.norm(x))
        return velocity


class WAMPolicy(nn.Module):
    """Predicts a chunk of actions together with the observations that they lead to.

    Batches are normalized. Training: every feature of `config.world` [B, 1 + F, width] (now and
    the future frames) with `<feature>_is_pad`, `action` [B, T, A], `action_is_pad` [B, T],
    `task_index` [B]. Inference: the features [B, width] or [B, 1 + F, width], and `task_index`.

    Raises:
        ConfigError: the dataset lacks a feature of `config.world`, or the action vector.
    """

    _fsdp_wrap_modules: ClassVar[list[str]] = ["MoTLayer"]
    _fsdp_forward_methods: ClassVar[list[str]] = ["predict_chunk", "predict_future"]

    def __init__(self, config: WAMConfig, spec: DataSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        sizes, observed = config.sizes, sum(spec.dim(name) for name in config.world)
        self.num_numbers = observed, spec.dim(ACTION)
        self.context = ContextTokens(config, spec, observed)
        self.world = NoisyStream(config.world_frames, observed, sizes.width)
        self.action = NoisyStream(config.chunk_size, spec.dim(ACTION), sizes.action_width)
        self.time = FlowTime(sizes.action_width)
        widths = sizes.width, sizes.width, sizes.action_width
        conditions = None, sizes.action_width, sizes.action_width
        self.layers = nn.ModuleList(
            MoTLayer(widths, sizes.n_heads, sizes.head_dim, conditions, layer == sizes.n_layers - 1)
            for layer in range(sizes.n_layers)
        )
        self._chunks = ChunkQueue(config.executed, None)

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss, a 0-dim mean over the unpadded action entries, and its parts.

        Every action entry carries the world error of its sample, so that the loss of a large
        batch is the mean of its parts' losses weighted by `loss_weight`.
        """
        seen_BGO = torch.cat([batch[name] for name in self.config.world], dim=-1)
        now_BO, world_BFO = seen_BGO[:, 0], seen_BGO[:, 1:]
        time_B = torch.rand(len(now_BO), device=now_BO.device)
        world_noise, action_noise = torch.randn_like(world_BFO), torch.randn_like(batch[ACTION])
        t = time_B[:, None, None].to(now_BO.dtype)
        v_world, v_action = self._velocities(
            batch["task_index"],
            now_BO,
            torch.lerp(world_noise, world_BFO, t),
            torch.lerp(action_noise, batch[ACTION], t),
            time_B,
        )
        world_error = (v_world - (world_BFO - world_noise)).square()
        action_error = (v_action - (batch[ACTION] - action_noise)).square()
        return self._loss(batch, world_error, action_error)

    @staticmethod
    def loss_weight(batch: Batch) -> Tensor:
        """Number of unpadded action entries, 0-dim: the weight of this batch's mean loss."""
        return (~batch["action_is_pad"]).sum() * batch[ACTION].shape[-1]

    @torch.no_grad()
    def predict_future(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Future observations [B, F, O] and actions [B, T, A], from noise in Euler steps.

        Draws the noise from torch's global generator.
        """
        now_BO = torch.cat([_now(batch[name]) for name in self.config.world], dim=-1)
        count, steps = len(now_BO), self.config.num_flow_steps
        world = now_BO.new_empty(count, self.config.world_frames, self.num_numbers[0]).normal_()
        action = now_BO.new_empty(count, self.config.chunk_size, self.num_numbers[1]).normal_()
        for step in range(steps):
            time_B = now_BO.new_full((count,), step / steps)
            velocities = self._velocities(batch["task_index"], now_BO, world, action, time_B)
            world, action = world + velocities[0] / steps, action + velocities[1] / steps
        return world, action

    def predict_chunk(self, batch: Batch) -> Tensor:
        """The chunk [B, T, A] that follows the observation."""
        return self.predict_future(batch)[1]

    @torch.no_grad()
    def select_action(self, batch: Batch) -> Tensor:
        """The action [B, A] to execute now. Call once per frame; `reset` between episodes."""
        return self._chunks.next_action(lambda: self.predict_chunk(batch))

    def reset(self) -> None:
        """Forget predicted actions: a new episode begins."""
        self._chunks.clear()

    def _velocities(
        self, task_B: Tensor, now_BO: Tensor, world_BFO: Tensor, action_BTA: Tensor, time_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocity of the world [B, F, O] and of the actions [B, T, A] at one point of the flow."""
        context_BSW, present_BS = self.context(task_B, now_BO)
        xs = (context_BSW, self.world.embed(world_BFO), self.action.embed(action_BTA))
        condition_BC = self.time(time_B)
        visible_B1NN = _visible(present_BS, world_BFO.shape[1] + action_BTA.shape[1])
        for layer in self.layers:
            xs = layer(xs, condition_BC, visible_B1NN)
        return self.world.velocity(xs[1]), self.action.velocity(xs[2])

    def _loss(
        self, batch: Batch, world_error_BFO: Tensor, action_error_BTA: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        pad_BT = batch["action_is_pad"]
        entries_B = (~pad_BT).sum(dim=1) * action_error_BTA.shape[-1]
        count = entries_B.sum().clamp(min=1)
        action = action_error_BTA.masked_fill(pad_BT[..., None], 0).sum() / count
        pad_BF = batch[f"{self.config.world[0]}_is_pad"][:, 1:]
        frames_B = (~pad_BF).sum(dim=1).clamp(min=1) * world_error_BFO.shape[-1]
        world_B = world_error_BFO.masked_fill(pad_BF[..., None], 0).sum(dim=(1, 2)) / frames_B
        world = (world_B * entries_B).sum() / count
        loss = action + self.config.world_weight * world
        return loss, {"action_loss": action.detach(), "world_loss": world.detach()}


def _now(value: Tensor) -> Tensor:
    """The present frame of [B, 1 + F, width], or [B, width] as it is."""
    return value[:, 0] if value.ndim == 3 else value


def _visible(present_BS: Tensor, num_noisy: int) -> Tensor:
    """[B, 1, N, N]: true where the row's token may read the column's.

    No token reads an absent one, and the context reads no noisy one; so every row reads at least
    the observation.
    """
    batch, clean = present_BS.shape
    columns_BN = torch.cat([present_BS, present_BS.new_ones(batch, num_noisy)], dim=1)
    rows_N1 = torch.arange(clean + num_noisy, device=present_BS.device)[:, None]
    columns_1N = torch.arange(clean + num_noisy, device=present_BS.device)[None, :]
    allowed_NN = (rows_N1 >= clean) | (columns_1N < clean)
    return (columns_BN[:, None, :] & allowed_NN)[:, None]
