"""From texts, pictures, vectors and time to tokens of the streams, and back.

Shape suffixes: B batch, L bytes of a text, P patches of a picture, K numbers of a patch, S tokens,
W stream width, C width of the condition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_train.policies.wam.layers import RMSNorm, ZeroLinear

NO_BYTE = 256
"""Stands where a text is shorter than the longest."""


def text_bytes(texts: Sequence[str], limit: int) -> Tensor:
    """UTF-8 bytes of each text, cut off after `limit`: int64 [B, L], filled up with `NO_BYTE`."""
    found = [list(text.encode()[:limit]) for text in texts]
    # At least one byte: a tensor of empty texts would have no column.
    length = max(1, *(len(text) for text in found))
    filled = [text + [NO_BYTE] * (length - len(text)) for text in found]
    return torch.tensor(filled, device="cpu")  # also while a model is built on the meta device


@dataclass(frozen=True)
class PatchGrid:
    """Square pictures of `size` x `size` cut into patches of `patch` x `patch`, row by row."""

    size: int
    patch: int

    @property
    def num_patches(self) -> int:
        """P."""
        return (self.size // self.patch) ** 2

    @property
    def numbers(self) -> int:
        """K, of three channels."""
        return 3 * self.patch**2

    def cut(self, images: Tensor) -> Tensor:
        """From [..., 3, height, width] to [..., P, K]; other sizes are scaled, to a square."""
        # [..., 3, height, width] -> [M, 3, height, width]: interpolation takes one batch dim.
        flat = images.flatten(0, -4)
        if flat.shape[-2:] != (self.size, self.size):
            # "area" averages what falls into a pixel, so that shrinking does not alias.
            flat = F.interpolate(flat, size=(self.size, self.size), mode="area")
        # [M, 3, size, size] -> [M, K, rows, columns] -> [M, P, K]
        patches = F.pixel_unshuffle(flat, self.patch).flatten(2).transpose(1, 2)
        return patches.reshape(*images.shape[:-3], self.num_patches, self.numbers)

    def join(self, patches: Tensor) -> Tensor:
        """From [..., P, K] to [..., 3, size, size]."""
        side = self.size // self.patch
        # [..., P, K] -> [M, K, rows, columns]
        maps = patches.transpose(-1, -2).reshape(-1, self.numbers, side, side)
        shape = *patches.shape[:-2], 3, self.size, self.size
        return F.pixel_shuffle(maps, self.patch).reshape(shape)


class Positions(nn.Module):
    """A learned vector for each place of a sequence, added to its tokens."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small values."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_BSW: Tensor) -> Tensor:
        """Returns the shape of `x`, which may be shorter than the longest sequence."""
        return x_BSW + self.weight[: x_BSW.shape[1]]


class ContextTokens(nn.Module):
    """Clean tokens of what is known: the vectors, the pictures and the task's text.

    Args:
        width: W.
        num_numbers: Numbers of all vectors together; they make one token.
        num_patches: Patches of all cameras' pictures together; 0 without cameras.
        patch_numbers: K.
        max_bytes: Longest text.
    """

    def __init__(
        self, width: int, num_numbers: int, num_patches: int, patch_numbers: int, max_bytes: int
    ) -> None:
        super().__init__()
        self.vectors = nn.Linear(num_numbers, width)
        self.patches = nn.Linear(patch_numbers, width) if num_patches else None
        self.patch_position = Positions(num_patches, width) if num_patches else None
        # 256 bytes, and one for the filling.
        self.byte = nn.Embedding(NO_BYTE + 1, width)
        self.byte_position = Positions(max_bytes, width)

    def forward(
        self, now: Tensor, patches_BPK: Tensor | None, text_BL: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, S, W], and which of them mean something, [B, S].

        `now` holds the vectors, [B, numbers].
        """
        tokens = [self.vectors(now)[:, None]]
        if self.patches is not None and self.patch_position is not None:
            # [B, P, K] -> [B, P, W]
            tokens.append(self.patch_position(self.patches(patches_BPK)))
        # [B, L] -> [B, L, W]
        tokens.append(self.byte_position(self.byte(text_BL)))
        tokens_BSW = torch.cat(tokens, dim=1)
        # Vectors and pictures are always there; of the text, what is not filling.
        known = tokens_BSW.shape[1] - text_BL.shape[1]
        present = text_BL.new_ones(len(text_BL), known, dtype=torch.bool)
        return tokens_BSW, torch.cat([present, text_BL != NO_BYTE], dim=1)


class NoisyStream(nn.Module):
    """Into and out of what the flow carries: `num_tokens` tokens of `numbers` numbers each."""

    def __init__(self, num_tokens: int, numbers: int, width: int) -> None:
        super().__init__()
        self.num_tokens, self.numbers = num_tokens, numbers
        self.into = nn.Linear(numbers, width)
        self.position = Positions(num_tokens, width)
        self.norm = RMSNorm(width)
        # A new model predicts velocity 0, so its first losses do not depend on how it was drawn.
        self.out = ZeroLinear(width, numbers)

    def embed(self, x: Tensor) -> Tensor:
        """From numbers [B, tokens, numbers] to [B, tokens, W]."""
        embedded: Tensor = self.position(self.into(x))
        return embedded

    def velocity(self, x: Tensor) -> Tensor:
        """From [B, tokens, W] to a velocity [B, tokens, numbers]."""
        velocity: Tensor = self.out(self.norm(x))
        return velocity


class FlowTime(nn.Module):
    """The flow time in [0, 1] as a condition."""

    def __init__(self, width: int, num_frequencies: int = 64) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.first, self.second = nn.Linear(2 * num_frequencies, width), nn.Linear(width, width)

    def forward(self, time_B: Tensor) -> Tensor:
        """Returns [B, C]."""
        steps = torch.arange(self.num_frequencies, device=time_B.device) / self.num_frequencies
        # Times in [0, 1] become steps up to 1000, as diffusion models embed them (Ho et al. 2020,
        # arXiv:2006.11239).
        angle_BF = time_B[:, None] * 1000 * torch.exp(-math.log(10000.0) * steps)
        waves = torch.cat([angle_BF.sin(), angle_BF.cos()], dim=-1)
        # Under sharded mixed precision the weights are narrow here, and the time is not.
        condition_BC: Tensor = self.second(F.silu(self.first(waves.to(self.first.weight.dtype))))
        return condition_BC
