"""WAMPolicy: flow matching over the future of the world and the actions that lead there.

Three streams attend jointly in mixture-of-transformers layers (Liang et al. 2024,
arXiv:2411.04996), as do vision, language and action in pi0 (Black et al. 2024, arXiv:2410.24164):

    context   bytes of the task's text, vectors and pictures of the present; clean
    world     future vectors and pictures (as patches), on their way from noise to data
    action    the chunk of actions, on the same way at the same time

The flow is the straight line x_t = (1 - t) noise + t data (Lipman et al. 2023, arXiv:2210.02747);
the model predicts its velocity, data - noise. Context reads only itself; world and action read
everything.

Shape suffixes: B batch, F future frames, O width of the observed vectors, T chunk, A action width,
P patches of all cameras, K numbers of a patch, S context tokens, N tokens of all streams, W stream
width, C width of the condition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from parallel_train.data.spec import ACTION, DataSpec
from parallel_train.policies.chunks import ChunkQueue
from parallel_train.policies.noise import noise_of_samples, times_of_samples
from parallel_train.policies.pretrained import PretrainedPolicy
from parallel_train.policies.vision import require_cameras
from parallel_train.policies.wam.configuration import WAMConfig
from parallel_train.policies.wam.layers import MoTLayer
from parallel_train.policies.wam.tokens import (
    ContextTokens,
    FlowTime,
    NoisyStream,
    PatchGrid,
    text_bytes,
)

Batch = Mapping[str, Any]


class Future(NamedTuple):
    """What the flow arrives at, normalized as the batch was."""

    world: Tensor
    """Vectors of `config.world`, one after another: [B, F, O]."""
    pictures: Tensor | None
    """[B, F, cameras, 3, image_size, image_size]; None where none are predicted."""
    action: Tensor
    """[B, T, A]."""


class WAMPolicy(PretrainedPolicy):
    """Predicts a chunk of actions together with the observations that they lead to.

    Batches are normalized. Training:

    - every feature of `config.world` [B, 1 + F, width]: now, and the future frames, with
      `<feature>_is_pad` [B, 1 + F];
    - every camera [B, 1 + F, 3, height, width], without `predict_cameras` [B, 3, height, width];
    - `action` [B, T, A], `action_is_pad` [B, T];
    - `task_index` [B], or the texts themselves as `task`, a list of B strings.

    Inference reads the same without the actions; features may come without future frames
    ([B, width], [B, 3, height, width]).

    Raises:
        ConfigError: the dataset lacks a feature of `config.world`, a camera, or the action vector.
    """

    _fsdp_wrap_modules: ClassVar[list[str]] = ["MoTLayer"]
    _fsdp_forward_methods: ClassVar[list[str]] = ["predict_action_chunk", "predict_future"]
    text_table: Tensor

    def __init__(self, config: WAMConfig, spec: DataSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        require_cameras(spec, config.cameras)
        sizes, frames = config.sizes, config.world_frames
        observed = sum(spec.dim(name) for name in config.world)
        self.grid = PatchGrid(sizes.image_size, sizes.patch_size)
        patches = len(config.cameras) * self.grid.num_patches
        self.context = ContextTokens(
            sizes.width, observed, patches, self.grid.numbers, config.text_bytes
        )
        # The order of the entries is that of the tokens: world, pictures, action.
        self.noisy = nn.ModuleDict({"world": NoisyStream(frames, observed, sizes.width)})
        if config.predicted_cameras:
            numbers = self.grid.numbers
            self.noisy["pictures"] = NoisyStream(frames * patches, numbers, sizes.width)
        self.noisy["action"] = NoisyStream(config.chunk_size, spec.dim(ACTION), sizes.action_width)
        # C is the width of the action stream; each layer projects it to the width of its streams.
        self.time = FlowTime(sizes.action_width)
        widths = sizes.width, sizes.width, sizes.action_width
        # The context is clean: the flow time does not concern it.
        conditions = None, sizes.action_width, sizes.action_width
        self.layers = nn.ModuleList(
            MoTLayer(widths, sizes.n_heads, sizes.head_dim, conditions, layer == sizes.n_layers - 1)
            for layer in range(sizes.n_layers)
        )
        self.register_buffer("text_table", torch.empty(0), persistent=False)
        self.reset_buffers()
        self._chunks = ChunkQueue(config.executed, None)

    def reset_buffers(self) -> None:
        """Compute the bytes of every task's text anew: they are in no checkpoint."""
        # A dataset without tasks has one empty text.
        self.text_table = text_bytes(self.spec.tasks or ("",), self.config.text_bytes)

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss, a 0-dim mean over the unpadded action entries, and its parts.

        Every action entry carries the world error of its sample, so that the loss of a large
        batch is the mean of its parts' losses weighted by `loss_weight`.

        Flow time and noise are drawn anew in training. In evaluation mode they belong to the sample
        (`index` [B] of the dataset, where the batch has it), so that losses can be compared.
        """
        data = {ACTION: batch[ACTION], **self._future(batch)}
        time_B, noise = self._drawn(batch, {name: data[name] for name in self.noisy})
        # [B] -> [B, 1, 1], beside [B, tokens, numbers]
        t = time_B[:, None, None].to(batch[ACTION].dtype)
        # x_t = (1 - t) noise + t data, and its velocity data - noise: eq. 22 and 23 of
        # arXiv:2210.02747 with sigma_min = 0.
        along = {name: torch.lerp(noise[name], data[name], t) for name in self.noisy}
        velocities = self._velocities(self._context(batch), along, time_B)
        errors = {n: (v - (data[n] - noise[n])).square() for n, v in velocities.items()}
        return self._loss(batch, errors)

    def _drawn(
        self, batch: Batch, like: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Flow time [B] and the noise at its beginning, shaped like each of `like`."""
        if self.training or "index" not in batch:
            time_B = torch.rand(len(batch[ACTION]), device=batch[ACTION].device)
            return time_B, {name: torch.randn_like(value) for name, value in like.items()}
        # A held-out loss must not differ between evaluations because other noise was drawn.
        return times_of_samples(batch["index"]), noise_of_samples(batch["index"], like)

    @staticmethod
    def loss_weight(batch: Batch) -> Tensor:
        """Number of unpadded action entries, 0-dim: the weight of this batch's mean loss."""
        entries: Tensor = (~batch["action_is_pad"]).sum() * batch[ACTION].shape[-1]
        return entries

    def predict_future(self, batch: Batch) -> Future:
        """Observations and actions from noise, in Euler steps; without gradients.

        Draws the noise from torch's global generator.
        """
        found = self._sample(batch)
        pictures = None
        if "pictures" in found:
            frames, cameras = self.config.world_frames, len(self.config.cameras)
            shape = -1, frames, cameras, self.grid.num_patches, self.grid.numbers
            pictures = self.grid.join(found["pictures"].reshape(shape))
        return Future(found["world"], pictures, found[ACTION])

    def predict_action_chunk(self, batch: Batch) -> Tensor:
        """The chunk [B, T, A] that follows the observation; without gradients."""
        return self._sample(batch)[ACTION]

    @torch.no_grad()
    def select_action(self, batch: Batch) -> Tensor:
        """The action [B, A] to execute now. Call once per frame; `reset` between episodes."""
        return self._chunks.next_action(lambda: self.predict_action_chunk(batch))

    def reset(self) -> None:
        """Forget predicted actions: a new episode begins."""
        self._chunks.clear()

    @torch.no_grad()
    def _sample(self, batch: Batch) -> dict[str, Tensor]:
        # The context does not depend on the flow time: its tokens are made once for all steps.
        context, steps = self._context(batch), self.config.num_flow_steps
        tokens_BSW = context[0]
        x = {name: self._noise(name, batch, len(tokens_BSW)) for name in self.noisy}
        for step in range(steps):
            # fp32 also where tokens are narrow: the time is multiplied by 1000 before its waves.
            time_B = tokens_BSW.new_full((len(tokens_BSW),), step / steps, dtype=torch.float32)
            velocities = self._velocities(context, x, time_B)
            # One step of Euler along the learned velocity, from t = 0 (noise) to 1 (data).
            x = {name: x[name] + velocity / steps for name, velocity in velocities.items()}
        return x

    def _noise(self, name: str, batch: Batch, count: int) -> Tensor:
        stream = self.noisy[name]
        assert isinstance(stream, NoisyStream)
        shape = count, stream.num_tokens, stream.numbers
        # In the dtype of the batch, not of the weights: it is mixed with data in training too.
        noise: Tensor = batch[self.config.world[0]].new_empty(shape).normal_()
        return noise

    def _context(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Clean tokens [B, S, W], and which of them mean something, [B, S]."""
        now = torch.cat([_now(batch[name], 2) for name in self.config.world], dim=-1)
        # [B, 3, height, width] -> [B, P of one camera, K]
        pictures = [self.grid.cut(_now(batch[name], 4)) for name in self.config.cameras]
        text_BL = (
            self.text_table[batch["task_index"]]  # [B] -> [B, L]
            if "task" not in batch
            else text_bytes(batch["task"], self.config.text_bytes).to(now.device)
        )
        tokens: tuple[Tensor, Tensor] = self.context(
            now, torch.cat(pictures, dim=1) if pictures else None, text_BL
        )
        return tokens

    def _future(self, batch: Batch) -> dict[str, Tensor]:
        """What the world stream arrives at: vectors [B, F, O], pictures [B, F * P, K]."""
        # Frame 0 is the present, which the context holds.
        world = torch.cat([batch[name][:, 1:] for name in self.config.world], dim=-1)
        # [B, F, 3, height, width] -> [B, F, P of one camera, K]
        pictures = [self.grid.cut(batch[n][:, 1:]) for n in self.config.predicted_cameras]
        if not pictures:
            return {"world": world}
        return {"world": world, "pictures": torch.cat(pictures, dim=2).flatten(1, 2)}

    def _velocities(
        self, context: tuple[Tensor, Tensor], x: Mapping[str, Tensor], time_B: Tensor
    ) -> dict[str, Tensor]:
        """Velocity of everything that the flow carries, shaped like `x`, at one point of it."""
        context_BSW, present_BS = context
        streams: dict[str, NoisyStream] = dict(self.noisy.items())  # type: ignore[arg-type]
        embedded = {name: stream.embed(x[name]) for name, stream in streams.items()}
        # Vectors and pictures share the world stream; the actions have one of their own.
        action = embedded.pop(ACTION)
        xs = (context_BSW, torch.cat([*embedded.values()], dim=1), action)
        condition_BC = self.time(time_B)
        visible_B1NN = _visible(present_BS, xs[1].shape[1] + xs[2].shape[1])
        for layer in self.layers:
            xs = layer(xs, condition_BC, visible_B1NN)
        # The world stream's tokens apart again, in the order in which they were joined.
        parts = torch.split(xs[1], [part.shape[1] for part in embedded.values()], dim=1)
        ends = {**dict(zip(embedded, parts, strict=True)), ACTION: xs[2]}
        return {name: streams[name].velocity(end) for name, end in ends.items()}

    def _loss(self, batch: Batch, errors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        pad_BT = batch["action_is_pad"]
        # [B]
        entries_B = (~pad_BT).sum(dim=1) * errors[ACTION].shape[-1]
        # A batch that is all padding gives 0 and not 0 / 0.
        count = entries_B.sum().clamp(min=1)
        action = errors[ACTION].masked_fill(pad_BT[..., None], 0).sum() / count
        loss, metrics = action, {"action_loss": action.detach()}
        # One feature stands for all: they are read at the same frames.
        pad_BF = batch[f"{self.config.world[0]}_is_pad"][:, 1:]
        for name, weight in (
            ("world", self.config.world_weight),
            ("pictures", self.config.camera_weight),
        ):
            if name in errors:
                # [B, F, O], or [B, F * P, K] as [B, F, P * K]
                error_BFX = errors[name].reshape(*pad_BF.shape, -1)
                error_B = _mean_frame(error_BFX, pad_BF)
                part = (error_B * entries_B).sum() / count
                loss, metrics[f"{name}_loss"] = loss + weight * part, part.detach()
        return loss, metrics


def _now(value: Tensor, num_dims: int) -> Tensor:
    """The present frame of a value with a time dim, or a value of `num_dims` as it is."""
    return value[:, 0] if value.ndim > num_dims else value


def _mean_frame(error_BFX: Tensor, pad_BF: Tensor) -> Tensor:
    """Mean error [B] over the frames inside of the episode; 0 where there is none."""
    error_BF = error_BFX.mean(dim=-1).masked_fill(pad_BF, 0)
    return error_BF.sum(dim=1) / (~pad_BF).sum(dim=1).clamp(min=1)


def _visible(present_BS: Tensor, num_noisy: int) -> Tensor:
    """[B, 1, N, N]: true where the row's token may read the column's.

    No token reads an absent one, and the context reads no noisy one; so every row reads at least
    the observation.
    """
    batch, clean = present_BS.shape
    # Absent are only bytes of short texts; noisy tokens are always there.
    columns_BN = torch.cat([present_BS, present_BS.new_ones(batch, num_noisy)], dim=1)
    rows_N1 = torch.arange(clean + num_noisy, device=present_BS.device)[:, None]
    columns_1N = torch.arange(clean + num_noisy, device=present_BS.device)[None, :]
    # Were the context to read noise, its tokens would change with every step of the flow.
    allowed_NN = (rows_N1 >= clean) | (columns_1N < clean)
    # [B, 1, N] & [N, N] -> [B, N, N], and a dim for the heads
    return (columns_BN[:, None, :] & allowed_NN)[:, None]
