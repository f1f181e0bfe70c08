"""Where weights and optimizer state are read from, box by box.

Bytes go from the file straight into the memory of the shard wherever they lie there in the same
order, so that nothing is held twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.dcp import read_dcp
from parallel_ckpt.formats.dcp_item import MalformedItem
from parallel_ckpt.formats.safetensors import read_tensors
from parallel_ckpt.formats.stored import Piece, StoredTensor
from parallel_ckpt.formats.tensor_files import OpenFiles, safetensors_in
from parallel_ckpt.state.shards import Shard, flat_bytes
from parallel_ckpt.state.torch_dtypes import torch_dtype
from parallel_ckpt.store.contents import Contents


class Source:
    """Stored tensors that shards are filled from; each rank reads the rows that it holds."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors
        """What is there, by key."""
        self._files = OpenFiles()

    def position(self, key: str) -> tuple[str, int]:
        """File and byte at which a tensor begins."""
        pieces = self.tensors[key].pieces
        return (pieces[0].file.name, pieces[0].begin) if pieces else ("", 0)

    def fill(self, key: str, target: Shard) -> int:
        """Copy the stored values of the target's box into its memory; how many there were.

        Several threads may call it at once.

        Raises:
            DamagedCheckpoint: a file cannot be read, or holds something else than was announced.
        """
        tensor, num_filled = self.tensors[key], 0
        for piece in tensor.pieces:
            common = piece.box.overlap(target.box)
            if common is not None:
                with self._files.located(key, piece, tensor.dtype) as (file, found):
                    place = target.local[common.within(target.box)]
                    _copy(file, found, common, place, torch_dtype(tensor.dtype))
                num_filled += common.volume
        return num_filled

    def close(self) -> None:
        """Let go of open files."""
        self._files.close()


def weights_of(contents: Contents) -> Source:
    """Weights of a committed checkpoint: safetensors where it has any, else DCP."""
    if contents.safetensors:
        return Source(contents.read_safetensors())
    return dcp_source(contents.folder.dcp, contents)


def safetensors_source(path: Path) -> Source:
    """The weights in one file, or in a folder that is not part of a checkpoint.

    A folder without any weight file by name was written by hand: there every safetensors file
    counts.
    """
    if path.is_file():
        return Source(read_tensors([path]))
    files, index = safetensors_in(path)
    return Source(read_tensors(files or sorted(path.glob("*.safetensors")), index))


def dcp_source(folder: Path, contents: Contents | None = None) -> Source:
    """A folder in torch's distributed checkpoint format, by FQN; nothing in it is unpickled.

    Of a committed checkpoint, whose `contents` are then given, only listed files are read.

    Raises:
        DamagedCheckpoint: it cannot be read, or holds what could only be unpickled.
    """
    stored = read_dcp(folder) if contents is None else contents.read_dcp(folder)
    if stored.objects:
        raise DamagedCheckpoint.of(
            folder, f"holds pickled objects, which are never read: {stored.objects[:3]}."
        )
    return Source(stored.tensors)


def _copy(file: int, piece: Piece, common: Box, place: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy the part of a piece that is wanted to its place in a shard."""
    if piece.strides is not None:
        flat = torch.empty(piece.num_bytes // dtype.itemsize, dtype=dtype)
        _read_into(flat, file, piece.begin)
        values = flat.as_strided(piece.box.sizes, piece.strides, piece.first)
        _put(values[common.within(piece.box)], place)
        return
    rows, begin = _rows(piece, common, dtype.itemsize)
    if _has_the_bytes_of(place, rows, dtype):
        _read_into(place, file, begin)
        return
    values = torch.empty(rows.sizes, dtype=dtype)
    _read_into(values, file, begin)
    _put(values[common.within(rows)], place)


def _put(values: torch.Tensor, place: torch.Tensor) -> None:
    """Copy values to a place that may repeat elements along a dim, as an expanded tensor does."""
    for dim, (size, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if size > 1 and not stride:
            first = values.narrow(dim, 0, 1)
            if not same_bits(values, first.expand_as(values)):
                raise MalformedItem("has several values where the tensor to fill has one, repeated")
            values, place = first, place.narrow(dim, 0, 1)
    place.copy_(values)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN and signed zeros included."""
    return torch.equal(flat_bytes(one.contiguous()), flat_bytes(other.contiguous()))


def _rows(piece: Piece, common: Box, item_bytes: int) -> tuple[Box, int]:
    """The whole rows of a piece that hold what is wanted of it, and the byte where they begin.

    Whole rows are one run of bytes. Reading some columns alone would take a call for each row.
    """
    offsets, sizes = piece.box.offsets, piece.box.sizes
    if not sizes:
        return piece.box, piece.begin
    start, length = common.offsets[0], common.sizes[0]
    begin = piece.begin + (start - offsets[0]) * math.prod(sizes[1:]) * item_bytes
    return Box((start, *offsets[1:]), (length, *sizes[1:])), begin


def _has_the_bytes_of(place: torch.Tensor, rows: Box, dtype: torch.dtype) -> bool:
    """Whether the bytes of the rows are, one after another, those of the place."""
    is_alike = place.dtype == dtype and tuple(place.shape) == rows.sizes
    is_plain = place.device.type == "cpu" and place.is_contiguous()
    return is_alike and is_plain and not place.is_conj() and not place.is_neg()


def _read_into(tensor: torch.Tensor, file: int, begin: int) -> None:
    """Fill a contiguous tensor in host memory with the bytes of a file from `begin` on."""
    if not tensor.numel():
        return
    view = flat_bytes(tensor).numpy().data
    while view:
        count = os.preadv(file, [view], begin)
        if not count:
            raise MalformedItem("the file ends within the tensor")
        view = view[count:]
        begin += count
