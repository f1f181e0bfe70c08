"""Tensors as they lie in files, whatever the format: resuming and converting read the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt.formats.box import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and the bytes of a file that hold it."""

    box: Box
    file: Path
    begin: int
    """First byte, from the start of the file."""
    num_bytes: int
    in_archive: bool = False
    """Whether the bytes are an archive; `dcp_item.locate` finds the elements in it."""
    crc32: int | None = None
    """Of the bytes, as the writer recorded it; None where the format does not record any."""
    strides: tuple[int, ...] | None = None
    """In elements; None when the elements lie in order and without gaps."""
    first: int = 0
    """Element of the bytes at which the box begins; 0 when they lie in order."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor; its pieces are disjoint and cover it."""

    dtype: str
    """Named as in torch: `float32`. Safetensors files have no name for some that DCP can hold."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Without the empty ones."""

    @property
    def is_streamable(self) -> bool:
        """Whether each piece is one run of the tensor's bytes: rows of dim 0, in order."""
        return all(p.strides is None and p.box.is_rows_of(self.shape) for p in self.pieces)
