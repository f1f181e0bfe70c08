"""An index beside `.metadata`: the same facts in a form that is quick to read. Needs no torch.

`.metadata` is a pickle of objects, and of a large run it takes a minute to read by itself. What we
write has an index as well. It also says where the elements of each tensor lie inside of their
items, so that a reader does not have to look into the items at all. Only a checkpoint whose
manifest lists the index is read through it: nothing else ties it to the files beside it.

    {"index_version": 1, "files": ["__0_0.distcp"], "tensors": {"a": ["float32", [4, 2], [...]]}}

The last list holds a row of numbers for each box: file, first byte, bytes, CRC32, then the box's
offsets and sizes. A CRC32 of -1 stands for an item whose elements must be looked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from operator import add, eq, mul
from pathlib import Path
from typing import Any, NamedTuple

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.checked_json import MAX_COUNT, parse_json
from parallel_ckpt.formats.dcp import DcpFolder, are_disjoint
from parallel_ckpt.formats.dtypes import TORCH_ITEM_BYTES, is_shape
from parallel_ckpt.formats.limits import MAX_CHUNKS, MAX_METADATA_BYTES, MAX_NAME, shown
from parallel_ckpt.formats.pickles import MalformedPickle, collector_paused
from parallel_ckpt.formats.safetensors import is_file_name
from parallel_ckpt.formats.stored import Piece, StoredTensor
from parallel_ckpt.layout import DCP_INDEX

INDEX_VERSION = 1
IN_ITEM = -1
"""In place of a CRC32: the row gives the bytes of a whole item."""
_FIXED = 4  # numbers of a row before its box


class Row(NamedTuple):
    """A box of a tensor and where it lies, in plain values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    num_bytes: int
    crc32: int


def index_bytes(rows: Iterable[Row]) -> bytes:
    """The document that `read_index` reads."""
    files: dict[str, int] = {}
    tensors: dict[str, tuple[str, tuple[int, ...], list[int]]] = {}
    for row in rows:
        number = files.setdefault(row.file, len(files))
        numbers = tensors.setdefault(row.name, (row.dtype, row.shape, []))[2]
        numbers += (number, row.begin, row.num_bytes, row.crc32, *row.offsets, *row.sizes)
    document = {"index_version": INDEX_VERSION, "files": list(files), "tensors": tensors}
    return json.dumps(document, separators=(",", ":")).encode()


def read_index(folder: Path) -> DcpFolder:
    """What the index of a DCP folder says, with every number checked against the others.

    Raises:
        DamagedCheckpoint: it cannot be read, or contradicts itself.
    """
    path = folder / DCP_INDEX
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise DamagedCheckpoint.of(path, f"has more than {MAX_METADATA_BYTES} bytes.")
        with collector_paused():
            return _Reader(folder, parse_json(path.read_bytes(), path)).folder()
    except OSError as error:
        raise DamagedCheckpoint.of(path, f"cannot be read: {error.strerror}.") from error
    except MalformedPickle as error:
        raise DamagedCheckpoint.of(path, f"{error}.") from error


@dataclass(frozen=True)
class _Columns:
    """The rows of a tensor, turned on their side: whole columns are checked at once."""

    file: Sequence[int]
    begin: Sequence[int]
    num_bytes: Sequence[int]
    crc32: Sequence[int]
    offsets: Sequence[Sequence[int]]
    """By dim."""
    sizes: Sequence[Sequence[int]]

    @classmethod
    def of(cls, numbers: Sequence[int], dims: int) -> _Columns:
        width = _FIXED + 2 * dims
        columns = [numbers[i::width] for i in range(width)]
        file, begin, num_bytes, crc32 = columns[:_FIXED]
        boxes = columns[_FIXED:]
        return cls(file, begin, num_bytes, crc32, boxes[:dims], boxes[dims:])


class _Reader:
    def __init__(self, folder: Path, document: Mapping[str, Any]) -> None:
        version, files = document.get("index_version"), document.get("files")
        if version != INDEX_VERSION:
            raise MalformedPickle(
                f"has index_version {shown(version)}, but {INDEX_VERSION} is known"
            )
        if not isinstance(files, list) or not all(
            isinstance(name, str) and is_file_name(name) for name in files
        ):
            raise MalformedPickle("does not have a list of files in its folder")
        tensors = document.get("tensors")
        if not isinstance(tensors, dict):
            raise MalformedPickle("does not have tensors")
        self._folder = folder
        self._tensors: dict[str, Any] = tensors
        self._files = [folder / name for name in files]
        self._spans: list[list[tuple[int, int]]] = [[] for _ in files]
        self._num_chunks = 0

    def folder(self) -> DcpFolder:
        tensors = {key: self._tensor(key, value) for key, value in self._tensors.items()}
        for file, spans in zip(self._files, self._spans, strict=True):
            # Within a file the tensors are in order, which makes this sorting quick.
            spans.sort()
            if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
                raise MalformedPickle(f"has two tensors in the same bytes of {file.name!r}")
        return DcpFolder(self._folder, tensors, {key: (key,) for key in tensors}, ())

    def _tensor(self, key: str, value: Any) -> StoredTensor:
        if len(key) > MAX_NAME or not isinstance(value, list) or len(value) != 3:
            raise MalformedPickle(f"has something else than a tensor at {shown(key)}")
        dtype, shape, numbers = value
        if not isinstance(dtype, str) or dtype not in TORCH_ITEM_BYTES or not is_shape(shape):
            raise MalformedPickle(f"has {shown(key)} without a dtype or shape")
        width = _FIXED + 2 * len(shape)
        if not isinstance(numbers, list) or len(numbers) % width or not _are_whole(numbers):
            raise MalformedPickle(f"does not have rows of {width} numbers for {shown(key)}")
        self._num_chunks += len(numbers) // width
        if self._num_chunks > MAX_CHUNKS:
            raise MalformedPickle(f"has more than {MAX_CHUNKS} chunks")
        if not numbers:
            raise MalformedPickle(f"does not have a row for {shown(key)}")
        rows = _Columns.of(numbers, len(shape))
        return StoredTensor(dtype, tuple(shape), tuple(self._pieces(key, dtype, shape, rows)))

    def _pieces(
        self, key: str, dtype: str, shape: Sequence[int], rows: _Columns
    ) -> Iterator[Piece]:
        if max(rows.file) >= len(self._files):
            raise MalformedPickle(f"has {shown(key)} in a file that it does not name")
        if any(min(column) < 0 for column in (rows.file, rows.begin, rows.num_bytes)):
            raise MalformedPickle(f"has {shown(key)} at impossible bytes")
        self._check_boxes(key, dtype, shape, rows)
        if not math.prod(shape):
            return
        ends = map(add, rows.begin, rows.num_bytes)
        for file, *span in zip(rows.file, rows.begin, ends, strict=True):
            self._spans[file].append((span[0], span[1]))
        boxes = map(Box, _transposed(rows.offsets, rows), _transposed(rows.sizes, rows))
        for box, file, begin, num_bytes, crc32 in zip(
            boxes, rows.file, rows.begin, rows.num_bytes, rows.crc32, strict=True
        ):
            if crc32 == IN_ITEM:
                yield Piece(box, self._files[file], begin, num_bytes, True)
            else:
                yield Piece(box, self._files[file], begin, num_bytes, False, crc32)

    def _check_boxes(self, key: str, dtype: str, shape: Sequence[int], rows: _Columns) -> None:
        for length, offsets, sizes in zip(shape, rows.offsets, rows.sizes, strict=True):
            if min(offsets) < 0 or min(sizes) < 0 or max(map(add, offsets, sizes)) > length:
                raise MalformedPickle(
                    f"has a chunk that leaves {shown(key)} of shape {tuple(shape)}"
                )
        volumes = list(map(math.prod, _transposed(rows.sizes, rows)))
        needed = map(mul, volumes, repeat(TORCH_ITEM_BYTES[dtype]))
        exact = map(eq, needed, rows.num_bytes)
        if not all(
            is_exact or crc == IN_ITEM for is_exact, crc in zip(exact, rows.crc32, strict=True)
        ):
            raise MalformedPickle(f"has a chunk of {shown(key)} in too many or too few bytes")
        numel = math.prod(shape)
        if sum(volumes) != numel or (numel and not min(volumes)):
            raise MalformedPickle(f"has {sum(volumes)} of {numel} elements of {shown(key)}")
        if numel and not _is_grid(shape, rows):
            boxes = map(Box, _transposed(rows.offsets, rows), _transposed(rows.sizes, rows))
            if not are_disjoint(key, list(boxes)):
                raise MalformedPickle(f"has overlapping chunks of {shown(key)}")


def _are_whole(numbers: Sequence[Any]) -> bool:
    return set(map(type, numbers)) <= {int} and (
        not numbers or (min(numbers) >= IN_ITEM and max(numbers) < MAX_COUNT)
    )


def _transposed(by_dim: Sequence[Sequence[int]], rows: _Columns) -> Iterable[tuple[int, ...]]:
    """One tuple per row; without dims an empty one."""
    return zip(*by_dim, strict=True) if by_dim else repeat((), len(rows.file))


def _is_grid(shape: Sequence[int], rows: _Columns) -> bool:
    """As in `formats/dcp.py`, by whole columns: the boxes are the cells of a grid."""
    if len(set(_transposed(rows.offsets, rows))) != len(rows.file):
        return False
    for length, offsets, sizes in zip(shape, rows.offsets, rows.sizes, strict=True):
        starts = sorted(set(offsets))
        ends = dict(zip(starts, [*starts[1:], length], strict=True))
        if not all(map(eq, map(ends.__getitem__, offsets), map(add, offsets, sizes))):
            return False
    return True
