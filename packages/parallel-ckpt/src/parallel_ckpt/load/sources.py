"""The two formats that weights and optimizer state are read from, box by box.

Bytes go from the file straight into the memory of the shard wherever they lie there in the same
order, so that nothing is held twice.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_ckpt.formats.dcp import DcpChunk, read_dcp
from parallel_ckpt.formats.dcp_item import MalformedItem, find_payload
from parallel_ckpt.formats.safetensors import HeaderEntry, read_header
from parallel_ckpt.layout import DCP_METADATA
from parallel_ckpt.load.fill import Stored, volume
from parallel_ckpt.state.shards import Shard, narrow, overlap
from parallel_ckpt.state.torch_dtypes import TORCH_DTYPES
from parallel_ckpt.store.contents import Contents


def weight_files(folder: Path) -> list[Path]:
    """Files of a model's weights; processors keep tensors of their own beside them."""
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))


class SafetensorsSource:
    """Some safetensors files; each rank reads only the rows it holds.

    A path means that file, or all files of weights in that folder.
    """

    def __init__(self, files: Path | Sequence[Path]) -> None:
        self._tensors: dict[str, Stored] = {}
        self._entries: dict[str, tuple[Path, HeaderEntry]] = {}
        self._files = _OpenFiles()
        if isinstance(files, Path):
            files = [files] if files.is_file() else weight_files(files)
        for file in files:
            self._note(file)

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What is there, by name."""
        return self._tensors

    def position(self, key: str) -> tuple[str, int]:
        """See `Source`."""
        path, entry = self._entries[key]
        return path.name, entry.begin

    def fill(self, key: str, target: Shard) -> int:
        """See `Source`."""
        path, entry = self._entries[key]
        whole = _Box((0,) * len(entry.shape), entry.shape, self._tensors[key].dtype, entry.begin)
        try:
            return _fill(target, whole, self._files.descriptor(path))
        except (OSError, MalformedItem) as error:
            raise DamagedCheckpoint.of(path, f"cannot be read at {key}: {error}.") from error

    def close(self) -> None:
        """See `Source`."""
        self._files.close()

    def _note(self, path: Path) -> None:
        for name, entry in read_header(path).tensors.items():
            if name in self._tensors:
                raise DamagedCheckpoint.of(path, f"holds {name}, which another file holds too.")
            self._tensors[name] = Stored(entry.shape, TORCH_DTYPES[entry.dtype])
            self._entries[name] = path, entry


class DcpSource:
    """A folder in torch's distributed checkpoint format, by FQN; nothing in it is unpickled.

    Of a committed checkpoint, whose `contents` are then given, only files of its own are read.
    """

    def __init__(self, folder: Path, contents: Contents | None = None) -> None:
        if contents is not None:
            contents.require(folder / DCP_METADATA)
        self._stored = read_dcp(folder)
        if contents is not None:
            contents.require(*(folder / name for name in self._stored.files))
        if self._stored.objects:
            raise DamagedCheckpoint.of(
                folder, f"holds pickled objects, which are never read: {self._stored.objects[:3]}."
            )
        self._tensors = {
            key: Stored(tensor.shape, getattr(torch, tensor.dtype))
            for key, tensor in self._stored.tensors.items()
        }
        self._files = _OpenFiles()

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What is there, by key."""
        return self._tensors

    def position(self, key: str) -> tuple[str, int]:
        """See `Source`."""
        chunks = self._stored.tensors[key].chunks
        return (chunks[0].file, chunks[0].begin) if chunks else ("", 0)

    def fill(self, key: str, target: Shard) -> int:
        """See `Source`."""
        here = target.offsets, target.sizes
        return sum(
            self._fill(key, chunk, target)
            for chunk in self._stored.tensors[key].chunks
            if overlap(here, (chunk.offsets, chunk.sizes)) is not None
        )

    def close(self) -> None:
        """See `Source`."""
        self._files.close()

    def _fill(self, key: str, chunk: DcpChunk, target: Shard) -> int:
        path, dtype = self._stored.folder / chunk.file, self._tensors[key].dtype
        try:
            file = self._files.descriptor(path)
            payload = find_payload(file, chunk, self._stored.tensors[key].dtype)
            box = _Box(chunk.offsets, chunk.sizes, dtype, payload.begin)
            if payload.strides is None:
                return _fill(target, box, file)
            flat = torch.empty(payload.num_bytes // dtype.itemsize, dtype=dtype)
            _read_into(flat, file, payload.begin)
        except (OSError, MalformedItem) as error:
            raise DamagedCheckpoint.of(path, f"cannot be read at {key}: {error}.") from error
        return _copy(target, box, flat.as_strided(chunk.sizes, payload.strides, payload.first))


@dataclass(frozen=True, slots=True)
class _Box:
    """A part of a tensor whose elements lie in a file in order and without gaps."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    dtype: torch.dtype
    begin: int
    """Its first byte in the file."""


def _fill(target: Shard, box: _Box, file: int) -> int:
    """Read what a shard and a stored box have in common; how many elements that is."""
    common = overlap((target.offsets, target.sizes), (box.offsets, box.sizes))
    if common is None:
        return 0
    rows = _rows(box, common)
    place = narrow(target.local, common, target.offsets)
    if _is_same_memory(place, rows):
        _read_into(place, file, rows.begin)
        return volume(common)
    read = torch.empty(tuple(rows.sizes), dtype=rows.dtype)
    _read_into(read, file, rows.begin)
    return _copy(target, rows, read)


def _rows(box: _Box, common: list[tuple[int, int]]) -> _Box:
    """The whole rows of a box that hold what is wanted of it."""
    if not common:
        return box
    start, length = common[0]
    row_bytes = math.prod(box.sizes[1:]) * box.dtype.itemsize
    begin = box.begin + (start - box.offsets[0]) * row_bytes
    return _Box((start, *box.offsets[1:]), (length, *box.sizes[1:]), box.dtype, begin)


def _is_same_memory(place: torch.Tensor, rows: _Box) -> bool:
    """Whether the bytes of the rows are, one after another, those of the place."""
    return (
        place.device.type == "cpu"
        and place.dtype == rows.dtype
        and tuple(place.shape) == tuple(rows.sizes)
        and place.is_contiguous()
    )


def _copy(target: Shard, box: _Box, values: torch.Tensor) -> int:
    """Copy what a shard and a box that was read have in common; how many elements that is."""
    common = overlap((target.offsets, target.sizes), (box.offsets, box.sizes))
    if common is None:
        return 0
    place = narrow(target.local, common, target.offsets)
    place.copy_(narrow(values, common, box.offsets))
    return volume(common)


def _read_into(tensor: torch.Tensor, file: int, begin: int) -> None:
    """Fill a contiguous tensor in host memory with the bytes of a file from `begin` on."""
    if not tensor.numel():
        return
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    while view:
        count = os.preadv(file, [view], begin)
        if not count:
            raise MalformedItem("the file ends within the tensor")
        view = view[count:]
        begin += count


class _OpenFiles:
    """Files that are read from, each opened once."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def descriptor(self, path: Path) -> int:
        """Of a file opened for reading."""
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]

    def close(self) -> None:
        """Close all; they are opened anew where they are asked for again."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()
