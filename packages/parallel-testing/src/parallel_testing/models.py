"""Tiny models with the unusual properties that sharding and checkpoints must handle."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual layer: the wrap unit of the models here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        out: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return out


class TinyModel(nn.Module):
    """An MLP of blocks: (batch, in_features) to (batch, out_features)."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(
        self,
        *,
        in_features: int = 4,
        width: int = 8,
        out_features: int = 3,
        num_blocks: int = 2,
        seed: int | None = 0,
    ) -> None:
        """Weights are the same on every rank: `seed` is applied without touching other streams.

        None draws them from the global generator, which is what building on meta needs.
        """
        super().__init__()
        # Without devices: the weights are drawn on the CPU, and CUDA is not initialised for it.
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            self.embed = nn.Linear(in_features, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
            self.head = nn.Linear(width, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Predictions, of shape (batch, out_features)."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out


class OddModel(TinyModel):
    """TinyModel with many unusual properties; each flag can switch one of them off.

    It always has parameters of shapes (5,), (1,) and (3, 7). Two or four ranks cannot divide their
    first dimensions evenly.
    """

    def __init__(
        self,
        *,
        tied: bool = True,
        frozen: bool = True,
        scalar: bool = True,
        buffers: bool = True,
        unused: bool = True,
        seed: int | None = 0,
    ) -> None:
        """Each flag adds one unusual property; the comments describe it."""
        super().__init__(in_features=4, out_features=4, width=8, seed=seed)
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed + 1)
            # Uneven shapes: a shard of them is padded, or empty, on some ranks.
            self.five = nn.Parameter(torch.randn(5))
            self.one = nn.Parameter(torch.randn(1))
            self.three_by_seven = nn.Parameter(torch.randn(3, 7))
            self.scalar = nn.Parameter(torch.randn(())) if scalar else None  # FSDP2 refuses 0-dim
            self.unused = nn.Linear(3, 5) if unused else None  # never gets a gradient
            self.second_head = nn.Linear(8, 4)
        if tied:
            # One tensor under two names, which a checkpoint must store once and give back to both.
            self.second_head.weight = self.head.weight
        if frozen:
            # Parameters without a gradient and without optimizer state.
            self.embed.requires_grad_(False)
        if buffers:
            # One buffer is saved and must keep its integer dtype. The other is not saved: its
            # values come from the constructor, even where parameters are built on meta.
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)
        self._has_buffers = buffers

    def forward(self, x: Tensor) -> Tensor:
        """Predictions, of shape (batch, 4)."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self._has_buffers:
            hidden = hidden * self.scale
        # Every parameter takes part in the loss, except `unused`.
        extra = self.five.sum() + self.one.sum() + self.three_by_seven.sum()
        if self.scalar is not None:
            extra = extra * self.scalar
        out: Tensor = self.head(hidden) + self.second_head(hidden) + 0.01 * extra
        return out
