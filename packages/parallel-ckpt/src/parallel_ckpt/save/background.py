"""Saving in the background: copies that nothing else touches, and one thread that writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from parallel_ckpt.state.shards import Shard

if TYPE_CHECKING:
    from parallel_ckpt.save.rank_files import Share
    from parallel_ckpt.save.snapshot import Snapshot

T = TypeVar("T")

PINNED_BYTES = 2 << 30
"""Host memory that a rank's staging may lock. The buffers live as long as the saver, so what is
locked is lost to the page cache and to loader workers for the whole run."""


class Background(Generic[T]):
    """One call on a thread of its own, whose result or error is picked up by `result`."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), name="checkpoint")
        self._thread.start()

    def result(self) -> T:
        """Wait for the call to end; its value, or its error raised here."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome[0]

    def _run(self, act: Callable[[], T]) -> None:
        try:
            self._outcome.append(act())
        except BaseException as error:  # torch's own checkpoint errors are not `Exception`s
            self._error = error


class Staging:
    """Host buffers that each save fills anew. They are filled only while no save is in flight.

    Copies from a GPU are fast into pinned memory. Beyond `PINNED_BYTES` the buffers are ordinary
    memory: the pause of a save grows, and the host keeps its memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._pinned_bytes = 0

    def copy(self, snapshot: Snapshot, share: Share) -> Snapshot:
        """The snapshot with this rank's share in our buffers; other boxes keep only their shape."""
        staged = replace(
            snapshot,
            weights=self._copy("weights", snapshot.weights, share.weights),
            optimizer=self._copy("optimizer", snapshot.optimizer, share.optimizer),
        )
        # The copies are under way; training may change the tensors as soon as we return. Asking
        # for the stream of a device that holds nothing of ours would start CUDA on it.
        shards = (*snapshot.weights.values(), *snapshot.optimizer.values())
        for device in {shard.local.device for shard in shards if shard.local.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return staged

    def _copy(
        self, prefix: str, shards: Mapping[str, Shard], needed: Collection[str]
    ) -> dict[str, Shard]:
        return {
            name: shard.with_local(
                self._fill(f"{prefix}/{name}", shard.local)
                if name in needed
                else shard.local.to("meta")
            )
            for name, shard in shards.items()
        }

    def _fill(self, key: str, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            pinned = source.is_cuda and self._may_pin(source.nbytes)
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer.copy_(source, non_blocking=source.is_cuda)

    def _may_pin(self, size_bytes: int) -> bool:
        # torch's allocator of pinned memory rounds each request up to a power of two.
        locked = 1 << max(size_bytes - 1, 0).bit_length()
        if self._pinned_bytes + locked > PINNED_BYTES:
            return False
        self._pinned_bytes += locked
        return True
