"""Where the plain bytes of a tensor lie inside a stored item of a DCP file. Needs no torch.

An item is what `torch.save` writes for one tensor: an uncompressed zip archive with a description
(`data.pkl`) and the bytes (`data/0`). Here the archive's directory is read, the description goes
through our own reader, and what comes out is a range of bytes.

Python's `zipfile` is not used: it wants a file object of the archive alone, reads each record's
bytes to check them, and takes tens of calls of the system per tensor where this takes two.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from parallel_ckpt.formats.checked_json import is_count
from parallel_ckpt.formats.dtypes import TORCH_ITEM_BYTES
from parallel_ckpt.formats.limits import shown
from parallel_ckpt.formats.pickles import Global, Made, MalformedPickle, Persistent, read_pickle
from parallel_ckpt.formats.stored import Piece

MAX_RECORDS = 64
MAX_DIRECTORY_BYTES = 65_536
MAX_DESCRIPTION_BYTES = 65_536
WINDOW_BYTES = 4_096
"""Read at once from either end of an item, where all but the elements lies."""

# The parts of a zip archive (PKWARE's APPNOTE.TXT, section 4.3) and where in each a field stands.
# An archive is read from its end: the end record names the directory, whose entries name the
# records. Each part has a fixed length, and names and extra fields of variable length behind it.
_LOCAL_SIGNATURE = b"PK\x03\x04"
_LOCAL_BYTES = 30
_LOCAL_LENGTHS_AT = 26  # of the name, of the extra field
_ENTRY_SIGNATURE = b"PK\x01\x02"
_ENTRY_BYTES = 46
_ENTRY_FLAGS_AT = 8  # flags, method of compression
_ENTRY_SIZES_AT = 16  # CRC, size as stored, size
_ENTRY_LENGTHS_AT = 28  # of the name, of the extra field, of the comment
_ENTRY_RECORD_AT = 42  # offset of the record
_END_SIGNATURE = b"PK\x05\x06"
_END_BYTES = 22
_END_COUNT_AT = 10  # records, size of the directory, offset of the directory
# Archives whose numbers do not fit into 32 bits have two more parts before the end record.
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_LOCATOR_BYTES = 20
_WIDE_END_SIGNATURE = b"PK\x06\x06"
_WIDE_END_BYTES = 56
_WIDE_END_COUNT_AT = 32  # the same three numbers with 64 bits
_WIDE_FIELD = 1  # kind of the extra field that holds numbers of 64 bits
_IN_WIDE_FIELD = 0xFFFFFFFF  # stands in place of a number that the extra field holds
_ENCRYPTED = 1
_STORED = 0  # method: not compressed


class MalformedItem(ValueError):
    """The item is not a whole tensor as torch saves it, or not the one that was announced."""


def locate(descriptor: int, piece: Piece, dtype: str) -> Piece:
    """The piece by the bytes of its elements, found by a few small reads of its file.

    A piece that is not in an archive is returned as it is. `dtype` is named as in torch.

    Raises:
        MalformedItem: says what differs from what `.metadata` announced.
    """
    if not piece.in_archive:
        return piece
    size_bytes, end = os.fstat(descriptor).st_size, piece.begin + piece.num_bytes
    if end > size_bytes:
        raise MalformedItem(f"ends at byte {size_bytes}, before byte {end} that .metadata names")
    item = _Item(descriptor, piece.begin, piece.num_bytes)
    try:
        records = _records(item)
        _require_little_endian(item, records)
        tensor = _described(_read(item, records, "data.pkl", MAX_DESCRIPTION_BYTES))
    except MalformedPickle as error:
        raise MalformedItem(str(error)) from error
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedItem("does not hold a whole archive where .metadata names one") from error
    return _elements(tensor, records, piece, dtype)


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
            raise MalformedItem(f"has record {shown(name)} twice or outside of its item")
        records[name] = record
    return records


def _end_record(item: _Item) -> tuple[int, int, int]:
    """Number of records, size and offset of the archive's directory."""
    # torch writes no comment behind the end record, so that it stands at a known place.
    tail_bytes = min(item.length, _WIDE_END_BYTES + _LOCATOR_BYTES + _END_BYTES)
    tail = item.read(tail_bytes, item.length - tail_bytes)
    end_at = len(tail) - _END_BYTES
    if end_at < 0 or not tail.startswith(_END_SIGNATURE, end_at):
        raise MalformedItem("does not end as an archive does where .metadata says that it ends")
    count, size, at = struct.unpack_from("<HII", tail, end_at + _END_COUNT_AT)
    is_wide = tail.startswith(_LOCATOR_SIGNATURE, max(0, end_at - _LOCATOR_BYTES))
    if is_wide and tail.startswith(_WIDE_END_SIGNATURE):
        count, size, at = struct.unpack_from("<QQQ", tail, _WIDE_END_COUNT_AT)
    return count, size, at


def _directory_entry(item: _Item, directory: bytes, position: int) -> tuple[str, _Record, int]:
    """Name and place of a record, and where the next entry begins."""
    if not directory.startswith(_ENTRY_SIGNATURE, position):
        raise MalformedItem("has a damaged archive directory")
    flags, method = struct.unpack_from("<HH", directory, position + _ENTRY_FLAGS_AT)
    crc32, packed, size = struct.unpack_from("<III", directory, position + _ENTRY_SIZES_AT)
    lengths = struct.unpack_from("<HHH", directory, position + _ENTRY_LENGTHS_AT)
    (at,) = struct.unpack_from("<I", directory, position + _ENTRY_RECORD_AT)
    name_begin = position + _ENTRY_BYTES
    extra_begin = name_begin + lengths[0]
    name = directory[name_begin:extra_begin].decode()
    extra = directory[extra_begin : extra_begin + lengths[1]]
    size, packed, at = _wide(extra, size, packed, at)
    if method != _STORED or packed != size or flags & _ENCRYPTED:
        raise MalformedItem(f"has record {shown(name)} compressed or encrypted")
    record = _Record(_first_byte(item, name, at), size, crc32)
    # The archive's root folder is named after the file that torch thought it wrote.
    return name.split("/", 1)[-1], record, name_begin + sum(lengths)


def _first_byte(item: _Item, name: str, at: int) -> int:
    """Where the bytes of a record begin, from the start of the file.

    The record repeats its name and has an extra field of its own length: torch pads it so that the
    elements begin at a multiple of 64 bytes, which the directory does not tell.
    """
    local = item.read(_LOCAL_BYTES, at) if at + _LOCAL_BYTES <= item.length else b""
    if not local.startswith(_LOCAL_SIGNATURE):
        raise MalformedItem(f"has a damaged record {shown(name)}")
    name_bytes, extra_bytes = struct.unpack_from("<HH", local, _LOCAL_LENGTHS_AT)
    return item.begin + at + _LOCAL_BYTES + int(name_bytes) + int(extra_bytes)


def _wide(extra: bytes, size: int, packed: int, at: int) -> tuple[int, int, int]:
    """Numbers beyond 32 bits, which stand in an extra field, each only where it is needed."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == _WIDE_FIELD:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            try:
                size = next(wide) if size == _IN_WIDE_FIELD else size
                packed = next(wide) if packed == _IN_WIDE_FIELD else packed
                at = next(wide) if at == _IN_WIDE_FIELD else at
            except StopIteration:
                raise MalformedItem("has a damaged archive directory") from None
        position += 4 + length
    return size, packed, at


def _read(item: _Item, records: Mapping[str, _Record], name: str, limit: int) -> bytes:
    record = records.get(name)
    if record is None or record.num_bytes > limit:
        raise MalformedItem(f"does not have a {name} of at most {limit} bytes")
    return item.read(record.num_bytes, record.begin - item.begin)


def _require_little_endian(item: _Item, records: Mapping[str, _Record]) -> None:
    if "byteorder" in records and _read(item, records, "byteorder", 16) != b"little":
        raise MalformedItem("was written on a big-endian machine")


STORAGES: Mapping[str, str] = {
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
"""Dtypes as torch names them, by the class of storage that its items name."""
_CALLS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")


def _is_allowed(module: str, name: str) -> bool:
    return (
        (module == "torch._utils" and name in _CALLS)
        or (module == "torch" and (name in STORAGES or name in TORCH_ITEM_BYTES))
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
    dtype = STORAGES.get(kind.name, kind.name) if isinstance(kind, Global) else ""
    if not (_are_counts((first,)) and _are_counts(shape) and _are_counts(strides)):
        raise MalformedItem("describes a tensor of impossible shape")
    return _Description(storage.id[2], dtype, first, shape, strides)


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(map(is_count, values))


def _elements(
    tensor: _Description, records: Mapping[str, _Record], piece: Piece, dtype: str
) -> Piece:
    if tensor.shape != piece.box.sizes or tensor.dtype != dtype:
        raise MalformedItem(
            f"holds {tensor.dtype} {shown(tensor.shape)} where .metadata says {dtype} "
            f"{shown(piece.box.sizes)}"
        )
    record = records.get(f"data/{tensor.storage}")
    if record is None or len(tensor.strides) != len(tensor.shape):
        raise MalformedItem("does not hold bytes for its tensor")
    item_bytes = TORCH_ITEM_BYTES[dtype]
    needed = item_bytes * math.prod(tensor.shape)
    found = Piece(piece.box, piece.file, record.begin, record.num_bytes, crc32=record.crc32)
    if _is_in_order(tensor) and record.num_bytes == needed:
        return found
    # Any other tensor is a view of its storage: transposed, or a part of what was stored.
    last = tensor.first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    # A tensor that repeats elements would make a small file pose as a large one.
    reaches_beyond = last * item_bytes >= record.num_bytes or record.num_bytes < needed
    if record.num_bytes % item_bytes or reaches_beyond:
        raise MalformedItem(f"has {record.num_bytes} bytes for a tensor that reaches beyond them")
    return replace(found, strides=tensor.strides, first=tensor.first)


def _is_in_order(tensor: _Description) -> bool:
    """Whether the elements are stored in order from the first on.

    The stride of a dim of size 1 says nothing, and torch leaves any number there.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.first == 0
