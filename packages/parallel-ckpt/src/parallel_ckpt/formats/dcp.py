"""What a folder of `torch.distributed.checkpoint` holds, read without torch and without unpickling.

`read_dcp` reads `.metadata`: which tensors there are, and which bytes of which file hold each part
of them. Every number is checked against the others here, so that whoever follows them reads within
the files and fills each tensor exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from parallel_ckpt.errors import CheckpointNotFound, DamagedCheckpoint
from parallel_ckpt.formats.checked_json import is_count
from parallel_ckpt.formats.dtypes import TORCH_ITEM_BYTES, is_shape
from parallel_ckpt.formats.pickles import Global, Made, MalformedPickle, Pairs, read_pickle
from parallel_ckpt.formats.safetensors import is_file_name
from parallel_ckpt.layout import DCP_METADATA

MAX_METADATA_BYTES = 1_000_000_000
MAX_CHUNKS = 1_000_000
MAX_LOOSE_CHUNKS = 64
"""Parts of one tensor that lie in no grid are compared two by two, up to this many."""
MAX_NAME = 4_096


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor, and the bytes of the stored item that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    """Name of a file in the folder."""
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A stored tensor; its chunks are disjoint and cover it."""

    dtype: str
    """As torch names it: `float32`."""
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]
    """Without the empty ones."""
    path: tuple[str, ...]
    """Where it sat in the nested state dict that was saved; its key alone when that is unknown."""


@dataclass(frozen=True)
class DcpFolder:
    """A checked reading of `.metadata`."""

    folder: Path
    tensors: Mapping[str, DcpTensor]
    objects: tuple[str, ...]
    """Keys of pickled values; nothing ever reads them."""

    @property
    def files(self) -> list[str]:
        """Names of the files that hold tensors, sorted."""
        return sorted({chunk.file for t in self.tensors.values() for chunk in t.chunks})


def read_dcp(folder: Path) -> DcpFolder:
    """Read and check the `.metadata` of a DCP folder.

    Raises:
        CheckpointNotFound: there is none.
        DamagedCheckpoint: it is no such document; the message says what was found.
    """
    path = folder / DCP_METADATA
    if not path.is_file():
        raise CheckpointNotFound.of(folder, f"holds no {DCP_METADATA}, so it is no DCP folder.")
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise DamagedCheckpoint.of(path, f"has more than {MAX_METADATA_BYTES} bytes.")
    return parse_metadata(path.read_bytes(), folder)


def parse_metadata(data: bytes, folder: Path) -> DcpFolder:
    """As `read_dcp`, from the bytes of the document."""
    try:
        document = _fields(read_pickle(data, _is_allowed), "Metadata")
        return _Parser(document).folder(folder)
    except MalformedPickle as error:
        raise DamagedCheckpoint.of(folder / DCP_METADATA, f"{error}.") from error


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    ),
}


def _is_allowed(module: str, name: str) -> bool:
    return (module, name) in _ALLOWED or (module == "torch" and name in TORCH_ITEM_BYTES)


class _Parser:
    """From the records of the document to checked values; one pass, each number looked at once."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._entries = _text_map(document.get("state_dict_metadata"), "state_dict_metadata")
        self._stored = _stored_items(document.get("storage_data"))
        self._paths = document.get("planner_data")
        self._num_chunks = 0

    def folder(self, folder: Path) -> DcpFolder:
        paths = _paths(self._paths)
        tensors: dict[str, DcpTensor] = {}
        objects: list[str] = []
        for key, entry in self._entries.items():
            if _is_made(entry, "BytesStorageMetadata"):
                objects.append(key)
            else:
                tensors[key] = self._tensor(key, entry, paths.get(key, (key,)))
        _check_disjoint(tensors)
        return DcpFolder(folder, tensors, tuple(objects))

    def _tensor(self, key: str, entry: Any, path: tuple[str, ...]) -> DcpTensor:
        fields = _fields(entry, "TensorStorageMetadata")
        shape = _size(fields.get("size"))
        chunks = fields.get("chunks")
        if not isinstance(chunks, list) or isinstance(chunks, Pairs):
            raise MalformedPickle(f"has no list of chunks for {key[:200]!r}")
        self._num_chunks += len(chunks)
        if self._num_chunks > MAX_CHUNKS:
            raise MalformedPickle(f"has more than {MAX_CHUNKS} chunks")
        found = tuple(self._chunks(key, shape, chunks))
        _check_cover(key, shape, found)
        return DcpTensor(_dtype(fields.get("properties")), shape, found, path)

    def _chunks(self, key: str, shape: tuple[int, ...], chunks: list[Any]) -> Iterator[DcpChunk]:
        for chunk in chunks:
            fields = _fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise MalformedPickle(f"has a chunk of other dims than {key[:200]!r}")
            if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
                raise MalformedPickle(f"has a chunk that leaves {key[:200]!r} of shape {shape}")
            if math.prod(sizes):
                stored = self._stored.get((key, offsets)) or self._stored.get((key, None))
                if stored is None:
                    raise MalformedPickle(f"has no bytes for {key[:200]!r} at {offsets}")
                yield DcpChunk(offsets, sizes, *stored)


def _stored_items(value: Any) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    if not isinstance(value, Pairs):
        raise MalformedPickle("has no storage_data")
    items: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in value:
        where = _fields(index, "MetadataIndex")
        fqn, offset = where.get("fqn"), where.get("offset")
        if not isinstance(fqn, str) or len(fqn) > MAX_NAME:
            raise MalformedPickle("has stored data of no key")
        key = (fqn, None if offset is None else _size(offset))
        if key in items:
            raise MalformedPickle(f"has stored data of {fqn[:200]!r} twice")
        items[key] = _storage_info(_fields(info, "_StorageInfo"), fqn)
    return items


def _storage_info(fields: Mapping[str, Any], key: str) -> tuple[str, int, int]:
    file, begin, length = (fields.get(name) for name in ("relative_path", "offset", "length"))
    if fields.get("transform_descriptors"):
        raise MalformedPickle(f"has {key[:200]!r} compressed or otherwise transformed")
    if not isinstance(file, str) or not is_file_name(file):
        raise MalformedPickle(f"has {key[:200]!r} in {str(file)[:200]!r}, no file of the folder")
    if not (is_count(begin) and is_count(length)):
        raise MalformedPickle(f"has {key[:200]!r} at impossible bytes")
    return file, begin, length  # type: ignore[return-value]


def _check_cover(key: str, shape: Sequence[int], chunks: Sequence[DcpChunk]) -> None:
    """All chunks together are the tensor: as many elements, and no two share one."""
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape):
        raise MalformedPickle(
            f"has {covered} of {math.prod(shape)} elements of {key[:200]!r} of shape {tuple(shape)}"
        )
    if chunks and not _is_grid(shape, chunks) and not _are_disjoint(key, chunks):
        raise MalformedPickle(f"has overlapping chunks of {key[:200]!r}")


def _is_grid(shape: Sequence[int], chunks: Sequence[DcpChunk]) -> bool:
    """Whether the chunks are the cells that cutting each dim at some places gives."""
    if len({chunk.offsets for chunk in chunks}) != len(chunks):
        return False
    for dim, length in enumerate(shape):
        starts = sorted({chunk.offsets[dim] for chunk in chunks})
        ends = dict(zip(starts, [*starts[1:], length], strict=True))
        if any(ends[c.offsets[dim]] != c.offsets[dim] + c.sizes[dim] for c in chunks):
            return False
    return True


def _are_disjoint(key: str, chunks: Sequence[DcpChunk]) -> bool:
    if len(chunks) > MAX_LOOSE_CHUNKS:
        raise MalformedPickle(f"has {len(chunks)} chunks of {key[:200]!r} that form no grid")
    return not any(
        _overlap(first, second) for i, first in enumerate(chunks) for second in chunks[:i]
    )


def _overlap(a: DcpChunk, b: DcpChunk) -> bool:
    return all(
        p < q + m and q < p + n
        for p, n, q, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _check_disjoint(tensors: Mapping[str, DcpTensor]) -> None:
    """No byte is stored for two tensors: a small file cannot pose as a huge model."""
    spans = sorted((c.file, c.begin, c.length) for t in tensors.values() for c in t.chunks)
    for (file, begin, length), (other, next_begin, _) in pairwise(spans):
        if file == other and begin + length > next_begin:
            raise MalformedPickle(f"has two tensors in the same bytes of {file!r}")


def _paths(value: Any) -> dict[str, tuple[str, ...]]:
    """Paths in the nested state dict by key; what is no such path is left out."""
    paths: dict[str, tuple[str, ...]] = {}
    for key, path in value if isinstance(value, Pairs) else ():
        if isinstance(key, str) and isinstance(path, tuple) and 0 < len(path) <= 64:
            parts = [part for part in path if isinstance(part, str | int)]
            if len(parts) == len(path) and sum(len(str(part)) for part in parts) <= MAX_NAME:
                paths[key] = tuple(str(part) for part in parts)
    return paths


def _is_made(value: Any, name: str) -> bool:
    return isinstance(value, Made) and value.kind.name == name


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The attributes of an object that the document makes of the class `name`."""
    if not _is_made(value, name) or not isinstance(value.state, Pairs) or len(value.state) > 16:
        raise MalformedPickle(f"has something else where a {name} belongs")
    return _text_map(value.state, name)


def _text_map(value: Any, where: str) -> dict[str, Any]:
    pairs = value.items if _is_made(value, "OrderedDict") else value
    if not isinstance(pairs, Pairs):
        raise MalformedPickle(f"has no {where}")
    fields: dict[str, Any] = {}
    for key, item in pairs:
        if not isinstance(key, str) or len(key) > MAX_NAME or key in fields:
            raise MalformedPickle(f"has a key twice, or no text as a key, in {where}")
        fields[key] = item
    return fields


def _size(value: Any) -> tuple[int, ...]:
    """A `torch.Size`."""
    args = value.args if _is_made(value, "Size") else (value,)
    if len(args) != 1 or not isinstance(args[0], tuple) or not is_shape(args[0]):
        raise MalformedPickle("has an impossible shape or offset")
    return args[0]


def _dtype(properties: Any) -> str:
    """The first value in the state of `TensorProperties`."""
    state = properties.state if _is_made(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or dtype.name not in TORCH_ITEM_BYTES:
        raise MalformedPickle("has a tensor of no dtype")
    return dtype.name
