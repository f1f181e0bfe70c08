"""Where the plain bytes of a tensor lie inside a stored item of a DCP file. Needs no torch.

An item is what `torch.save` writes for one tensor: an uncompressed zip archive with a description
(`data.pkl`) and the bytes (`data/0`). Here the archive's directory is read, the description goes
through our own reader, and what comes out is a range of bytes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from parallel_ckpt.formats.dcp import DcpChunk
from parallel_ckpt.formats.dtypes import TORCH_ITEM_BYTES
from parallel_ckpt.formats.pickles import Global, Made, MalformedPickle, Persistent, read_pickle

MAX_RECORDS = 64
MAX_DIRECTORY_BYTES = 65_536
MAX_DESCRIPTION_BYTES = 65_536
WINDOW_BYTES = 4_096
"""Read at once from either end of an item, where all but the elements lies."""


class MalformedItem(ValueError):
    """The item is no whole tensor as torch saves it, or another one than was announced."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A tensor's elements in a file."""

    begin: int
    num_bytes: int
    crc32: int
    """As the writer recorded it."""
    strides: tuple[int, ...] | None
    """In elements; None when the elements lie in order without gaps."""
    first: int
    """Element of the stored bytes at which the tensor starts; 0 when they lie in order."""


def find_payload(descriptor: int, chunk: DcpChunk, dtype: str) -> Payload:
    """The bytes of a chunk, found by a few small reads of its file.

    Raises:
        MalformedItem: says what differs from what `.metadata` announced.
    """
    if chunk.begin + chunk.length > os.fstat(descriptor).st_size:
        raise MalformedItem(
            f"ends at byte {os.fstat(descriptor).st_size}, before byte "
            f"{chunk.begin + chunk.length} that .metadata names"
        )
    item = _Item(descriptor, chunk.begin, chunk.length)
    try:
        records = _records(item)
        _require_little_endian(item, records)
        tensor = _described(_read(item, records, "data.pkl", MAX_DESCRIPTION_BYTES))
    except MalformedPickle as error:
        raise MalformedItem(str(error)) from error
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedItem("holds no whole archive where .metadata names one") from error
    return _payload(tensor, records, chunk, dtype)


class _Item:
    """The bytes of an item by their offset in it, with few calls of the system."""

    def __init__(self, descriptor: int, begin: int, length: int) -> None:
        self.begin = begin
        self.length = length
        self._descriptor = descriptor
        self._head = os.pread(descriptor, min(length, 2 * WINDOW_BYTES), begin)
        self._tail = self._head
        if length > len(self._head):
            self._tail = os.pread(descriptor, WINDOW_BYTES, begin + length - WINDOW_BYTES)

    def read(self, size: int, at: int) -> bytes:
        """`size` bytes at offset `at`, fewer where the file ends."""
        if at + size <= len(self._head):
            return self._head[at : at + size]
        first = self.length - len(self._tail)
        if at >= first and at + size <= self.length:
            return self._tail[at - first : at - first + size]
        return os.pread(self._descriptor, size, self.begin + at)


@dataclass(frozen=True, slots=True)
class _Record:
    begin: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class _Description:
    storage: str
    dtype: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _records(item: _Item) -> dict[str, _Record]:
    """The archive's files by their name below its root folder."""
    count, size, at = _end_record(item)
    if count > MAX_RECORDS or size > MAX_DIRECTORY_BYTES or at + size > item.length:
        raise MalformedItem(f"has an impossible archive directory of {count} records")
    directory = item.read(size, at)
    records: dict[str, _Record] = {}
    position = 0
    for _ in range(count):
        name, record, position = _directory_entry(item, directory, position)
        if record.begin + record.num_bytes > item.begin + at or name in records:
            raise MalformedItem(f"has record {name[:80]!r} twice or outside of its item")
        records[name] = record
    return records


def _end_record(item: _Item) -> tuple[int, int, int]:
    """Number of records, size and offset of the archive's directory."""
    tail_bytes = min(item.length, 22 + 20 + 56)
    tail = item.read(tail_bytes, item.length - tail_bytes)
    if tail[-22:-18] != b"PK\x05\x06":
        raise MalformedItem("does not end as an archive does where .metadata says that it ends")
    count, size, at = struct.unpack_from("<HII", tail, len(tail) - 22 + 10)
    if tail[-42:-38] == b"PK\x06\x07" and tail[:4] == b"PK\x06\x06":
        count, size, at = struct.unpack_from("<QQQ", tail, 32)
    return count, size, at


def _directory_entry(item: _Item, directory: bytes, position: int) -> tuple[str, _Record, int]:
    if directory[position : position + 4] != b"PK\x01\x02":
        raise MalformedItem("has a damaged archive directory")
    flags, method = struct.unpack_from("<HH", directory, position + 8)
    crc32, packed, size = struct.unpack_from("<III", directory, position + 16)
    name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", directory, position + 28)
    (at,) = struct.unpack_from("<I", directory, position + 42)
    extra_begin = position + 46 + name_bytes
    name = directory[position + 46 : extra_begin].decode()
    extra = directory[extra_begin : extra_begin + extra_bytes]
    size, packed, at = _wide(extra, size, packed, at)
    if method != 0 or packed != size or flags & 1:
        raise MalformedItem(f"has record {name[:80]!r} compressed or encrypted")
    local = item.read(30, at) if at + 30 <= item.length else b""
    if local[:4] != b"PK\x03\x04":
        raise MalformedItem(f"has a damaged record {name[:80]!r}")
    local_name_bytes, local_extra_bytes = struct.unpack_from("<HH", local, 26)
    first = item.begin + at + 30 + local_name_bytes + local_extra_bytes
    return (
        name.split("/", 1)[-1],
        _Record(first, size, crc32),
        extra_begin + extra_bytes + comment_bytes,
    )


def _wide(extra: bytes, size: int, packed: int, at: int) -> tuple[int, int, int]:
    """Numbers beyond 32 bits, which stand in an extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            full = 0xFFFFFFFF
            try:
                size = next(wide) if size == full else size
                packed = next(wide) if packed == full else packed
                at = next(wide) if at == full else at
            except StopIteration:
                raise MalformedItem("has a damaged archive directory") from None
        position += 4 + length
    return size, packed, at


def _read(item: _Item, records: Mapping[str, _Record], name: str, limit: int) -> bytes:
    record = records.get(name)
    if record is None or record.num_bytes > limit:
        raise MalformedItem(f"has no {name} of at most {limit} bytes")
    return item.read(record.num_bytes, record.begin - item.begin)


def _require_little_endian(item: _Item, records: Mapping[str, _Record]) -> None:
    if "byteorder" in records and _read(item, records, "byteorder", 16) != b"little":
        raise MalformedItem("was written on a big-endian machine")


_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_CALLS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")


def _is_allowed(module: str, name: str) -> bool:
    return (
        (module == "torch._utils" and name in _CALLS)
        or (module == "torch" and (name in _STORAGES or name in TORCH_ITEM_BYTES))
        or (module, name) == ("torch.storage", "UntypedStorage")
        or (module, name) == ("collections", "OrderedDict")
    )


@lru_cache(maxsize=256)
def _described(document: bytes) -> _Description:
    """What a description says; tensors of one shape and dtype have the same bytes."""
    return _describe(read_pickle(document, _is_allowed))


def _describe(value: Any) -> _Description:
    if isinstance(value, Made) and value.kind.name == "_rebuild_parameter" and value.args:
        value = value.args[0]
    if not isinstance(value, Made) or value.kind.name not in _CALLS[:2] or len(value.args) < 6:
        raise MalformedItem("describes something else than one dense tensor")
    storage, first, shape, strides = value.args[:4]
    if not isinstance(storage, Persistent) or not isinstance(storage.id, tuple):
        raise MalformedItem("describes a tensor without storage")
    if len(storage.id) != 5 or not isinstance(storage.id[2], str):
        raise MalformedItem("describes a tensor with an unknown kind of storage")
    kind = storage.id[1] if value.kind.name == "_rebuild_tensor_v2" else value.args[6]
    dtype = _STORAGES.get(kind.name, kind.name) if isinstance(kind, Global) else ""
    if not (_are_counts((first,)) and _are_counts(shape) and _are_counts(strides)):
        raise MalformedItem("describes a tensor of impossible shape")
    return _Description(storage.id[2], dtype, first, shape, strides)


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(
        type(value) is int and 0 <= value < 2**62 for value in values
    )


def _payload(
    tensor: _Description, records: Mapping[str, _Record], chunk: DcpChunk, dtype: str
) -> Payload:
    if tensor.shape != chunk.sizes or tensor.dtype != dtype:
        raise MalformedItem(
            f"holds {tensor.dtype} {tensor.shape} where .metadata says {dtype} {chunk.sizes}"
        )
    record = records.get(f"data/{tensor.storage}")
    item = TORCH_ITEM_BYTES[dtype]
    needed = item * math.prod(tensor.shape)
    if record is not None and _is_in_order(tensor) and record.num_bytes == needed:
        return Payload(record.begin, needed, record.crc32, None, 0)
    if record is None or len(tensor.strides) != len(tensor.shape):
        raise MalformedItem("holds no bytes for its tensor")
    last = tensor.first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    # A tensor that repeats elements would make a small file pose as a large one.
    if record.num_bytes % item or last * item >= record.num_bytes or record.num_bytes < needed:
        raise MalformedItem(f"has {record.num_bytes} bytes for a tensor that reaches beyond them")
    return Payload(record.begin, record.num_bytes, record.crc32, tensor.strides, tensor.first)


def _is_in_order(tensor: _Description) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.first == 0 and len(tensor.shape) == len(tensor.strides)
