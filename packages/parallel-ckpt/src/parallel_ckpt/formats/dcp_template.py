"""What stands around the bytes of a tensor in an item of a DCP file. Needs no torch.

`torch.save` takes most of a millisecond to write one small tensor. What it writes depends on the
dtype and the shape alone, except for the elements and their checksum. So the rest is put together
once and kept: an uncompressed zip archive (PKWARE's APPNOTE.TXT, section 4.3) with the records that
torch writes, in its order and with its alignment. `formats/dcp_item.py` is the reader.
"""

from __future__ import annotations

import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from parallel_ckpt.formats.dcp_item import STORAGES
from parallel_ckpt.formats.dtypes import TORCH_ITEM_BYTES

MAX_ELEMENT_BYTES = 0xFFFF0000
"""An archive with a longer record needs numbers of 64 bits, which no template here has."""
_ALIGNMENT = 64
_ELEMENTS = "data/0"
_SERIALIZATION_ID = ".data/serialization_id"
_ID = "%020d%020d"  # torch's has two numbers as well, and torch only logs them
_ID_BYTES = 40

_LOCAL = struct.Struct("<4s5H3I2H")
_PADDING = struct.Struct("<2sH")  # kind and length of the extra field that only fills
_DESCRIPTOR = struct.Struct("<4s3I")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_CRC_IN_DESCRIPTOR = 4
_CRC_IN_ENTRY = 16
# The names are UTF-8, and the checksum and the sizes follow behind the bytes of the record.
_FLAGS = 0x0808
_STORED = 0  # method: not compressed
_STORAGE_OF = {dtype: storage for storage, dtype in STORAGES.items()}


@dataclass(frozen=True, slots=True)
class Template:
    """An item whose elements are yet to come."""

    head: bytes
    """All that stands before the elements."""
    num_bytes: int
    """Of the elements."""
    _tail: bytes
    _element_crcs: tuple[int, ...]
    """Where in the tail the checksum of the elements stands."""
    _id_at: int
    _id_crcs: tuple[int, ...]
    _description_crc: int

    @property
    def length(self) -> int:
        """Bytes of the whole item."""
        return len(self.head) + self.num_bytes + len(self._tail)

    def tail(self, crc32: int) -> bytes:
        """All that stands behind the elements, of which `crc32` is the checksum."""
        tail = bytearray(self._tail)
        name = (_ID % (self._description_crc, crc32)).encode()
        tail[self._id_at : self._id_at + len(name)] = name
        id_crc = zlib.crc32(name)
        for at in self._element_crcs:
            struct.pack_into("<I", tail, at, crc32)
        for at in self._id_crcs:
            struct.pack_into("<I", tail, at, id_crc)
        return bytes(tail)


@lru_cache(maxsize=8_192)
def template_of(dtype: str, shape: tuple[int, ...]) -> Template | None:
    """The item of a tensor without gaps, by its dtype as torch names it and its shape.

    None where torch itself must write the item: the dtype is not one that items are known of, or
    the elements are too many for a plain archive.
    """
    item_bytes = TORCH_ITEM_BYTES.get(dtype)
    if item_bytes is None or item_bytes * math.prod(shape) > MAX_ELEMENT_BYTES:
        return None
    return _template(_description(dtype, shape), item_bytes * math.prod(shape))


def _template(description: bytes, num_bytes: int) -> Template:
    archive = _Archive()
    archive.add("data.pkl", description)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", b"%d" % _ALIGNMENT)
    archive.add("byteorder", b"little")
    begin = archive.open(_ELEMENTS)
    head = len(archive.out)
    archive.skipped = num_bytes
    archive.close(_ELEMENTS, begin, 0, num_bytes)
    archive.add("version", b"3\n")
    archive.add(_SERIALIZATION_ID, (_ID % (0, 0)).encode())
    # The descriptor follows the text of the id, its checksum after a signature.
    id_at = archive.crcs[_SERIALIZATION_ID][0] - _CRC_IN_DESCRIPTOR - _ID_BYTES
    archive.end()
    return Template(
        head=bytes(archive.out[:head]),
        num_bytes=num_bytes,
        _tail=bytes(archive.out[head:]),
        _element_crcs=tuple(at - head for at in archive.crcs[_ELEMENTS]),
        _id_at=id_at - head,
        _id_crcs=tuple(at - head for at in archive.crcs[_SERIALIZATION_ID]),
        _description_crc=zlib.crc32(description),
    )


class _Archive:
    """The bytes of an archive as they come, less the elements, and where its checksums stand."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.skipped = 0
        """Bytes of the elements, once they are passed."""
        self.crcs: dict[str, list[int]] = {}
        """Where in `out` the checksum of each record stands."""
        self._entries: list[tuple[str, int, int, int]] = []

    def add(self, name: str, content: bytes) -> None:
        """A whole record."""
        begin = self.open(name)
        self.out += content
        self.close(name, begin, zlib.crc32(content), len(content))

    def open(self, name: str) -> int:
        """What stands before the bytes of a record; where it begins in the archive."""
        begin, path = len(self.out) + self.skipped, _path(name)
        padding = -(begin + _LOCAL.size + len(path) + _PADDING.size) % _ALIGNMENT
        extra_bytes = _PADDING.size + padding
        self.out += _LOCAL.pack(
            b"PK\3\4", 0, _FLAGS, _STORED, 0, 0, 0, 0, 0, len(path), extra_bytes
        )
        self.out += path + _PADDING.pack(b"FB", padding) + b"Z" * padding
        return begin

    def close(self, name: str, begin: int, crc32: int, size: int) -> None:
        """What stands behind the bytes of a record."""
        self.crcs[name] = [len(self.out) + _CRC_IN_DESCRIPTOR]
        self.out += _DESCRIPTOR.pack(b"PK\7\10", crc32, size, size)
        self._entries.append((name, begin, crc32, size))

    def end(self) -> None:
        """The directory of all records, and what stands behind it."""
        begin = len(self.out)
        for name, first, crc32, size in self._entries:
            path = _path(name)
            self.crcs[name].append(len(self.out) + _CRC_IN_ENTRY)
            numbers = (crc32, size, size, len(path), 0, 0, 0, 0, 0, first)
            self.out += _ENTRY.pack(b"PK\1\2", 0, 0, _FLAGS, _STORED, 0, 0, *numbers) + path
        count, size = len(self._entries), len(self.out) - begin
        self.out += _END.pack(b"PK\5\6", 0, 0, count, count, size, begin + self.skipped, 0)


def _path(name: str) -> bytes:
    return f"archive/{name}".encode()


def _description(dtype: str, shape: Sequence[int]) -> bytes:
    """`data.pkl`: the call that makes the tensor of its storage, pickled with protocol 2."""
    storage = _STORAGE_OF.get(dtype)
    # torch has no class of storage for its younger dtypes: their tensors name the dtype beside.
    plain = storage is not None
    numel = math.prod(shape)
    count = numel if plain else numel * TORCH_ITEM_BYTES[dtype]
    call = "_rebuild_tensor_v2" if plain else "_rebuild_tensor_v3"
    kind = _global("torch", storage) if storage else _global("torch.storage", "UntypedStorage")
    stored = _tuple(_text("storage"), kind, _text("0"), _text("cpu"), _number(count))
    no_hooks = _global("collections", "OrderedDict") + b")R"
    return b"".join(
        [
            b"\x80\2" + _global("torch._utils", call),
            _tuple(
                stored + b"Q",  # the storage is named, not contained
                _number(0),
                _tuple(*map(_number, shape)),
                _tuple(*map(_number, _strides(shape))),
                b"\x89",  # False: needs no gradient
                no_hooks,
                *(() if plain else (_global("torch", dtype),)),
            ),
            b"R.",
        ]
    )


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return strides if shape else []


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _tuple(*parts: bytes) -> bytes:
    if len(parts) <= 3:
        return b"".join(parts) + (b")", b"\x85", b"\x86", b"\x87")[len(parts)]
    return b"(" + b"".join(parts) + b"t"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _number(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]  # without the marks of begin and end
