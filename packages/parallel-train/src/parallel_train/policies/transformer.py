"""Attention blocks shared by the policies.

Shape suffixes: B batch, Q queries, K keys, H heads, D width, E width of one head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class XavierLinear(nn.Linear):
    """Begins with Xavier-uniform weights and without a bias."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Multi-head attention of queries over keys."""

    def __init__(self, dim: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.to_q, self.to_k = XavierLinear(dim, dim), XavierLinear(dim, dim)
        self.to_v, self.to_out = XavierLinear(dim, dim), XavierLinear(dim, dim)

    def forward(
        self, q_BQD: Tensor, k_BKD: Tensor, v_BKD: Tensor, ignored_BK: Tensor | None = None
    ) -> Tensor:
        """Attend; keys where `ignored_BK` is true are left out. Returns [B, Q, D]."""
        # [B, Q, D] -> [B, H, Q, E]
        q_BHQE = self._split(self.to_q(q_BQD))
        k_BHKE, v_BHKE = self._split(self.to_k(k_BKD)), self._split(self.to_v(v_BKD))
        out_BHQE = F.scaled_dot_product_attention(
            q_BHQE,
            k_BHKE,
            v_BHKE,
            # Torch masks what may be read, so the mask is turned around: [B, 1, 1, K].
            attn_mask=None if ignored_BK is None else ~ignored_BK[:, None, None, :],
            # The function does not know of eval mode.
            dropout_p=self.dropout if self.training else 0.0,
        )
        # [B, H, Q, E] -> [B, Q, H, E] -> [B, Q, D]
        out_BQD: Tensor = self.to_out(out_BHQE.transpose(1, 2).flatten(2))
        return out_BQD

    def _split(self, x_BTD: Tensor) -> Tensor:
        # [B, T, D] -> [B, T, H, E] -> [B, H, T, E]
        return x_BTD.reshape(*x_BTD.shape[:2], self.n_heads, -1).transpose(1, 2)


class FeedForward(nn.Sequential):
    """Two linear layers with a ReLU between them."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__(
            XavierLinear(dim, hidden), nn.ReLU(), nn.Dropout(dropout), XavierLinear(hidden, dim)
        )


def sinusoids(length: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Sine and cosine position codes of shape [length, dim] (Vaswani et al. 2017)."""
    position_T1 = torch.arange(length, dtype=torch.float32, device=device)[:, None]
    frequency_F = torch.exp(torch.arange(0, dim, 2, device=device) * (-math.log(10000.0) / dim))
    angle_TF = position_T1 * frequency_F
    # Sine and cosine take turns: [T, F, 2] -> [T, dim].
    return torch.stack([angle_TF.sin(), angle_TF.cos()], dim=-1).flatten(1)
