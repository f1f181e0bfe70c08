"""The mixture-of-transformers layer: streams with weights of their own that attend jointly
(Liang et al. 2024, arXiv:2411.04996).

Shape suffixes: B batch, S tokens of one stream, N tokens of all streams, W width of one stream,
H heads, E width of one head, C width of the condition.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Modulation = tuple[Tensor, ...]


class RMSNorm(nn.RMSNorm):
    """Torch's, also where autocast gives it narrow inputs beside its fp32 weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the shape and dtype of `x`."""
        # The weight is cast and applied here, so that the result keeps the dtype of `x`.
        return F.rms_norm(x, self.normalized_shape, None, self.eps) * self.weight.to(x.dtype)


class ZeroLinear(nn.Linear):
    """Begins at zero: what it gates or predicts is nothing at first."""

    def reset_parameters(self) -> None:
        """Set everything to zero."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class SwiGLU(nn.Module):
    """Gated feed-forward network (Shazeer 2020, arXiv:2002.05202).

    It is as large as a plain one of 4 x width.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # Three matrices in place of two: 2/3 of 4 x width keeps the size. Rounded up to a multiple
        # of 16.
        hidden = -(-8 * width // 3 // 16) * 16
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the shape of `x`."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class StreamWeights(nn.Module):
    """What one stream owns in a layer: norms, projections, feed-forward and modulation.

    A conditioned stream scales, shifts and gates both halves by the flow time (adaLN-zero of
    Peebles and Xie 2023, arXiv:2212.09748): it begins as the identity. A stream that is not
    `updated` is only read, and owns nothing that would stay without a gradient.
    """

    def __init__(
        self, width: int, n_heads: int, head_dim: int, condition: int | None, updated: bool
    ) -> None:
        super().__init__()
        self.n_heads, self.updated = n_heads, updated
        self.norm1 = RMSNorm(width)
        self.to_qkv = nn.Linear(width, 3 * n_heads * head_dim, bias=False)
        # Per head: the scale of the projections then does not reach the attention logits.
        self.norm_q, self.norm_k = RMSNorm(head_dim), RMSNorm(head_dim)
        if updated:
            self.norm2 = RMSNorm(width)
            self.to_out = nn.Linear(n_heads * head_dim, width, bias=False)
            self.feed_forward = SwiGLU(width)
        self.modulation = None if condition is None else ZeroLinear(condition, 6 * width)

    def modulate(self, condition_BC: Tensor) -> Modulation | None:
        """Shift, scale and gate of both halves, six of [B, 1, W]; None for a clean stream."""
        if self.modulation is None:
            return None
        # [B, C] -> [B, 6 W] -> six of [B, 1, W], one for all tokens
        return tuple(self.modulation(F.silu(condition_BC))[:, None].chunk(6, dim=-1))

    def project(self, x_BSW: Tensor, m: Modulation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, H, S, E]."""
        h_BSW = self.norm1(x_BSW)
        if m is not None:
            # 1 + scale, since the modulation begins at zero.
            h_BSW = h_BSW * (1 + m[1]) + m[0]
        batch, tokens = h_BSW.shape[:2]
        # [B, S, 3 H E] -> [B, S, 3, H, E] -> [3, B, H, S, E]
        qkv = self.to_qkv(h_BSW).reshape(batch, tokens, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        q_BHSE, k_BHSE, v_BHSE = qkv.unbind(0)
        return self.norm_q(q_BHSE), self.norm_k(k_BHSE), v_BHSE

    def update(self, x_BSW: Tensor, read_BHSE: Tensor, m: Modulation | None) -> Tensor:
        """Add what attention read, then the feed-forward network; returns [B, S, W]."""
        if not self.updated:
            return x_BSW.clone()  # FSDP2 warns about a layer that returns a view of its input
        # [B, H, S, E] -> [B, S, H E] -> [B, S, W]
        read_BSW = self.to_out(read_BHSE.transpose(1, 2).flatten(2))
        # The gate is zero at first: a new layer passes a conditioned stream on as it is.
        x_BSW = x_BSW + (read_BSW if m is None else m[2] * read_BSW)
        h_BSW = self.norm2(x_BSW)
        if m is not None:
            h_BSW = h_BSW * (1 + m[4]) + m[3]
        change_BSW: Tensor = self.feed_forward(h_BSW)
        return x_BSW + (change_BSW if m is None else m[5] * change_BSW)


class MoTLayer(nn.Module):
    """One attention over the tokens of all streams, everything else by stream.

    In the `last` layer clean streams are read but not updated: nothing reads them afterwards.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        n_heads: int,
        head_dim: int,
        conditions: tuple[int | None, ...],
        last: bool = False,
    ) -> None:
        super().__init__()
        self.streams = nn.ModuleList(
            # A clean stream of the last layer gets no weights for an update that nothing would
            # read.
            StreamWeights(width, n_heads, head_dim, condition, not last or condition is not None)
            for width, condition in zip(widths, conditions, strict=True)
        )

    def forward(
        self, xs: tuple[Tensor, ...], condition_BC: Tensor, visible_B1NN: Tensor
    ) -> tuple[Tensor, ...]:
        """From one [B, S, W] per stream to the same; `visible` says who reads whom."""
        # Streams have widths of their own, but the same heads: they meet only in the attention.
        streams: list[StreamWeights] = list(self.streams)  # type: ignore[arg-type]
        modulations = [stream.modulate(condition_BC) for stream in streams]
        projected = [s.project(x, m) for s, x, m in zip(streams, xs, modulations, strict=True)]
        # [B, H, S, E] of each stream -> [B, H, N, E]
        q, k, v = (torch.cat(parts, dim=2) for parts in zip(*projected, strict=True))
        read_BHNE = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_B1NN)
        # [B, H, N, E] -> [B, H, S, E] for each stream again
        reads = torch.split(read_BHNE, [x.shape[1] for x in xs], dim=2)
        return tuple(
            stream.update(x, read, m)
            for stream, x, read, m in zip(streams, xs, reads, modulations, strict=True)
        )
