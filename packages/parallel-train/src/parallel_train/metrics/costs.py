"""What an update costs this rank beside its arithmetic: waiting for data, and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Waited(Generic[T]):
    """Iterates over `items`, and knows how long the last one was waited for."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self.seconds = 0.0
        """Of the item that came last."""

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds = time.perf_counter() - began


def peak_memory_gb(device: torch.device) -> float:
    """Most memory so far in 1e9 bytes: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # The system counts in KiB, on macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
