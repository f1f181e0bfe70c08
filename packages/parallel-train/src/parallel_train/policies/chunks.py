"""Which action of the predicted chunks is executed at this frame."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class ChunkQueue:
    """Executes chunks one after another, or averages the overlapping ones.

    Args:
        executed: actions of a chunk that are executed before the next prediction.
        ensemble: m of the weights exp(-m i), i = 0 the oldest chunk, with which every chunk that
            reaches the present frame is averaged; a chunk is then predicted at every frame. None
            executes chunks one after another.
    """

    def __init__(self, executed: int, ensemble: float | None) -> None:
        self._executed, self._ensemble = executed, ensemble
        self._actions: deque[Tensor] = deque()
        self._chunks: deque[Tensor] = deque()

    def clear(self) -> None:
        """Forget every predicted action."""
        self._actions.clear()
        self._chunks.clear()

    def next_action(self, predict: Callable[[], Tensor]) -> Tensor:
        """The action [B, A] of this frame; `predict` gives a chunk [B, T, A] when one is due."""
        if self._ensemble is not None:
            return self._averaged(predict(), self._ensemble)
        if not self._actions:
            # [B, T, A] -> `executed` actions of [B, A]; the rest of the chunk is dropped
            self._actions.extend(predict()[:, : self._executed].unbind(dim=1))
        return self._actions.popleft()

    def _averaged(self, chunk_BTA: Tensor, m: float) -> Tensor:
        """The weighted mean of what the chunks say. One that was predicted `age` frames ago says
        its action number `age`.
        """
        if len(self._chunks) == chunk_BTA.shape[1]:
            self._chunks.popleft()  # its last action was for the previous frame
        self._chunks.append(chunk_BTA)
        newest = len(self._chunks) - 1
        # Each chunk says another of its actions about this frame: the oldest one its last.
        opinions_NBA = torch.stack([c[:, newest - i] for i, c in enumerate(self._chunks)])
        # w_i = exp(-m i), i = 0 the oldest (arXiv:2304.13705, section IV-A and algorithm 2).
        weights_N = torch.exp(-m * torch.arange(newest + 1, device=chunk_BTA.device))
        # Divided before the cast: a narrow dtype would round the sum.
        weights_N = (weights_N / weights_N.sum()).to(opinions_NBA.dtype)
        return torch.einsum("n,nba->ba", weights_N, opinions_NBA)
