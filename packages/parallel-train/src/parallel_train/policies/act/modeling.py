"""ACT: action chunking with a conditional VAE and transformers (arXiv:2304.13705).

A variational encoder q(z | a, s) compresses the demonstrated chunk into a style variable z; a
transformer encoder reads z and the observation; a decoder with one learned query per future frame
writes the chunk. At inference z = 0, the mean of the prior.

Shape suffixes: B batch, T chunk, A action width, D model width, S observation tokens, L latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from parallel_config import ConfigError, Problem
from parallel_train.data.spec import ACTION, DataSpec
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.chunks import ChunkQueue
from parallel_train.policies.pretrained import PretrainedPolicy
from parallel_train.policies.transformer import Attention, FeedForward, XavierLinear, sinusoids
from parallel_train.policies.vision import ImageTokens, require_cameras

Batch = Mapping[str, Tensor]


class ACTEncoderLayer(nn.Module):
    """Self-attention and feed-forward, normalized after each; positions enter queries and keys."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        dim = config.dim_model
        self.attention = Attention(dim, config.n_heads, config.dropout)
        self.feed_forward = FeedForward(dim, config.dim_feedforward, config.dropout)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, pos_SD: Tensor, ignored_BS: Tensor | None = None) -> Tensor:
        """Returns [B, S, D]."""
        # As in DETR (arXiv:2005.12872): values carry no positions.
        qk_BSD = x_BSD + pos_SD
        x_BSD = self.norm1(x_BSD + self.dropout(self.attention(qk_BSD, qk_BSD, x_BSD, ignored_BS)))
        return self.norm2(x_BSD + self.dropout(self.feed_forward(x_BSD)))  # type: ignore[no-any-return]


class ACTDecoderLayer(nn.Module):
    """Self-attention over the chunk, attention to the observation, feed-forward."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        dim = config.dim_model
        self.self_attention = Attention(dim, config.n_heads, config.dropout)
        self.cross_attention = Attention(dim, config.n_heads, config.dropout)
        self.feed_forward = FeedForward(dim, config.dim_feedforward, config.dropout)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTD: Tensor, query_TD: Tensor, memory_BSD: Tensor, pos_SD: Tensor
    ) -> Tensor:
        """Returns [B, T, D]."""
        # The learned queries are the positions of the chunk's frames, so they enter as positions
        # do.
        qk_BTD = x_BTD + query_TD
        x_BTD = self.norm1(x_BTD + self.dropout(self.self_attention(qk_BTD, qk_BTD, x_BTD)))
        # [B, T, D] from S observation tokens: each frame of the chunk reads all of them.
        read_BTD = self.cross_attention(x_BTD + query_TD, memory_BSD + pos_SD, memory_BSD)
        x_BTD = self.norm2(x_BTD + self.dropout(read_BTD))
        return self.norm3(x_BTD + self.dropout(self.feed_forward(x_BTD)))  # type: ignore[no-any-return]


class ObservationTokens(nn.Module):
    """One token per observation vector, and one for the task where there are several."""

    def __init__(self, config: ACTConfig, spec: DataSpec) -> None:
        super().__init__()
        # Sorted by name: the order of the tokens is part of what the weights mean.
        self.names = tuple(spec.observation_vectors())
        widths = spec.observation_vectors().values()
        self.vectors = nn.ModuleList(XavierLinear(width, config.dim_model) for width in widths)
        count = len(spec.tasks)
        # With a single task the token would be a constant that tells nothing.
        numbered = config.knows_task_numbers(count)
        self.task = nn.Embedding(count, config.dim_model) if numbered else None

    @property
    def num_tokens(self) -> int:
        """Tokens per observation."""
        return len(self.names) + (self.task is not None)

    def forward(self, batch: Batch) -> Tensor:
        """From vectors [B, width] to tokens [B, S, D]."""
        # [B, width of the vector] -> [B, D] each
        tokens = [layer(batch[name]) for name, layer in zip(self.names, self.vectors, strict=True)]
        if self.task is not None:
            tokens.append(self.task(batch["task_index"]))  # [B] -> [B, D]
        return torch.stack(tokens, dim=1)  # [B, S, D]


class ToLatent(XavierLinear):
    """Begins near the prior, or the KL term would drown the actions."""

    def reset_parameters(self) -> None:
        """Draw small weights."""
        nn.init.normal_(self.weight, std=0.01)
        nn.init.zeros_(self.bias)


class VariationalEncoder(nn.Module):
    """q(z | a, s): mean and log-variance of the style variable of a demonstrated chunk."""

    positions: Tensor

    def __init__(self, config: ACTConfig, spec: DataSpec) -> None:
        super().__init__()
        dim = config.dim_model
        self.summary = nn.Parameter(torch.empty(1, 1, dim))
        self.observation = ObservationTokens(config, spec)
        self.action = XavierLinear(spec.dim(ACTION), dim)
        self.layers = nn.ModuleList(ACTEncoderLayer(config) for _ in range(config.n_vae_layers))
        # Mean and log-variance side by side: a diagonal Gaussian, as in the paper.
        self.to_latent = ToLatent(dim, 2 * config.latent_dim)
        # The summary token, the observation, the chunk.
        self._length = 1 + self.observation.num_tokens + config.chunk_size
        self.register_buffer("positions", torch.empty(0), persistent=False)
        self.reset_parameters()
        self.reset_buffers()

    def reset_parameters(self) -> None:
        """The token that gathers the summary begins at zero."""
        nn.init.zeros_(self.summary)

    def reset_buffers(self) -> None:
        """Compute the positions anew: they are in no checkpoint."""
        self.positions = sinusoids(self._length, self.summary.shape[-1])

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns mean and log-variance, each [B, L]."""
        # Pictures are left out here, as in the paper (section IV): the policy's encoder sees them.
        actions_BTD, pad_BT = self.action(batch[ACTION]), batch["action_is_pad"]
        context_BSD = self.observation(batch)
        # [1, 1, D] -> [B, 1, D], without a copy
        summary_B1D = self.summary.expand(len(actions_BTD), -1, -1)
        x_BND = torch.cat([summary_B1D, context_BSD, actions_BTD], dim=1)  # N = 1 + S + T
        # Only padded actions are ignored; the summary and the observation are always there.
        seen_BS = pad_BT.new_zeros(len(pad_BT), 1 + context_BSD.shape[1])
        ignored_BN = torch.cat([seen_BS, pad_BT], dim=1)
        for layer in self.layers:
            x_BND = layer(x_BND, self.positions, ignored_BN)
        # The summary token alone: [B, D] -> [B, 2 L] -> two of [B, L].
        mean_BL, log_variance_BL = self.to_latent(x_BND[:, 0]).chunk(2, dim=-1)
        return mean_BL, log_variance_BL


class ACTPolicy(PretrainedPolicy):
    """Predicts `chunk_size` actions from one observation.

    Batches are normalized (`Preprocessor`): observation vectors [B, width], pictures of
    `config.cameras` [B, 3, height, width], `task_index` [B]; in training also `action` [B, T, A]
    and `action_is_pad` [B, T].

    Raises:
        ConfigError: the dataset does not have an action vector and an observation.
    """

    _fsdp_wrap_modules: tuple[str, ...] = ("ACTEncoderLayer", "ACTDecoderLayer")
    _fsdp_forward_methods: ClassVar[list[str]] = ["predict_action_chunk"]

    def __init__(self, config: ACTConfig, spec: DataSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        dim = config.dim_model
        _check_observation(spec)
        self.observation = ObservationTokens(config, spec)
        self.image = _image_tokens(config, spec) if config.cameras else None
        if self.image is not None:
            # On this instance alone: without cameras the class has no such unit, and an unknown one
            # is an error.
            self._fsdp_wrap_modules += self.image.wrap_modules
        self.vae = VariationalEncoder(config, spec) if config.use_vae else None
        # Without the encoder too: z is then 0, and this is a learned token (its bias).
        self.latent = XavierLinear(config.latent_dim, dim)
        layers = config.n_encoder_layers, config.n_decoder_layers
        self.encoder = nn.ModuleList(ACTEncoderLayer(config) for _ in range(layers[0]))
        self.decoder = nn.ModuleList(ACTDecoderLayer(config) for _ in range(layers[1]))
        # Of z and the vectors; a picture brings its own.
        self.token_positions = nn.Parameter(torch.empty(1 + self.observation.num_tokens, dim))
        self.queries = nn.Parameter(torch.empty(config.chunk_size, dim))
        self.to_action = XavierLinear(dim, spec.dim(ACTION))
        self._chunks = ChunkQueue(config.executed, config.temporal_ensemble)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the positions and queries."""
        nn.init.normal_(self.token_positions)
        nn.init.normal_(self.queries)

    def load_pretrained(self) -> None:
        """Fetch `config.vision_weights`, if any; `ptrain train` does it for a new run.

        Raises:
            ConfigError: they cannot be fetched.
        """
        if self.image is not None:
            self.image.load_pretrained()

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss, a 0-dim mean over the unpadded action entries, and its parts.

        Every entry carries the KL term of its sample, so that the loss of a large batch is the
        mean of its parts' losses weighted by `loss_weight`.
        """
        target_BTA, pad_BT = batch[ACTION], batch["action_is_pad"]
        z_BL, kl_B = self._encode(batch)
        # L1 and not L2: the paper finds it more precise (section IV).
        error_BTA = (self._decode(batch, z_BL) - target_BTA).abs()
        # [B]: how many entries of each sample count
        entries_B = (~pad_BT).sum(dim=1) * target_BTA.shape[-1]
        # A batch that is all padding then gives 0 and not 0 / 0.
        count = entries_B.sum().clamp(min=1)
        l1 = error_BTA.masked_fill(pad_BT[..., None], 0).sum() / count
        # Weighted like the error, or splitting a batch would change the sum (see the docstring).
        kl = (kl_B * entries_B).sum() / count
        loss = l1 + self.config.kl_weight * kl
        return loss, {"l1_loss": l1.detach(), "kl_loss": kl.detach()}

    @staticmethod
    def loss_weight(batch: Batch) -> Tensor:
        """Number of unpadded action entries, 0-dim: the weight of this batch's mean loss."""
        return (~batch["action_is_pad"]).sum() * batch[ACTION].shape[-1]

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch) -> Tensor:
        """The chunk [B, T, A] that follows the observation, with z = 0; without gradients."""
        # At inference there are no actions to take the batch size from.
        first = next(iter(batch.values()))
        z_BL = self.latent.weight.new_zeros(len(first), self.config.latent_dim)
        return self._decode(batch, z_BL)

    @torch.no_grad()
    def select_action(self, batch: Batch) -> Tensor:
        """The action [B, A] to execute now. Call once per frame; `reset` between episodes."""
        return self._chunks.next_action(lambda: self.predict_action_chunk(batch))

    def reset(self) -> None:
        """Forget predicted actions: a new episode begins."""
        self._chunks.clear()

    def _encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sample z [B, L]; also KL(q || N(0, I)) per sample, [B].

        In evaluation mode z is the mean, so that a held-out loss has no noise.
        """
        if self.vae is None:
            count = len(batch[ACTION])
            # From a weight: the device and dtype that the layer computes in.
            zeros_BL = self.latent.weight.new_zeros(count, self.config.latent_dim)
            return zeros_BL, zeros_BL.sum(dim=-1)
        mean_BL, log_variance_BL = self.vae(batch)
        noise_BL = torch.randn_like(mean_BL) if self.training else torch.zeros_like(mean_BL)
        # The reparameterization, and below the KL of two Gaussians in closed form (Kingma and
        # Welling 2013, arXiv:1312.6114, section 2.4 and appendix B).
        z_BL = mean_BL + noise_BL * (0.5 * log_variance_BL).exp()
        kl_BL = -0.5 * (1 + log_variance_BL - mean_BL.square() - log_variance_BL.exp())
        return z_BL, kl_BL.sum(dim=-1)  # independent dims: their KLs add up, [B]

    def _decode(self, batch: Batch, z_BL: Tensor) -> Tensor:
        """From z and the observation to the chunk [B, T, A]."""
        memory_BSD, positions_SD = self._memory(batch, z_BL)
        for layer in self.encoder:
            memory_BSD = layer(memory_BSD, positions_SD)
        # The decoder's content begins at zero, as in DETR: only the queries tell its frames apart.
        x_BTD = torch.zeros_like(self.queries).expand(len(memory_BSD), -1, -1)
        for layer in self.decoder:
            x_BTD = layer(x_BTD, self.queries, memory_BSD, positions_SD)
        return self.to_action(x_BTD)  # type: ignore[no-any-return]

    def _memory(self, batch: Batch, z_BL: Tensor) -> tuple[Tensor, Tensor]:
        """What the encoder reads, [B, S, D], and its positions [S, D]: z, vectors, pictures."""
        # [B, L] -> [B, 1, D], then one token per vector; in the order of `token_positions`
        tokens = [self.latent(z_BL)[:, None], self.observation(batch)]
        positions: list[Tensor] = [self.token_positions]
        for camera, name in enumerate(self.config.cameras):
            assert self.image is not None
            # [B, 3, height, width] -> a token for each place of the feature map
            image_BSD, position_SD = self.image(batch[name], camera)
            tokens.append(image_BSD)
            positions.append(position_SD)
        return torch.cat(tokens, dim=1), torch.cat(positions)


def _image_tokens(config: ACTConfig, spec: DataSpec) -> ImageTokens:
    require_cameras(spec, config.cameras)
    return ImageTokens(
        config.vision_backbone, config.vision_weights, config.dim_model, len(config.cameras)
    )


def _check_observation(spec: DataSpec) -> None:
    if not spec.observation_vectors():
        raise ConfigError(
            Problem(
                "dataset.root",
                ": a float vector named observation.* is missing, but the policy reads one.",
                f"The dataset has: {', '.join(sorted(spec.features))}.",
            )
        )
