"""What a folder of `torch.distributed.checkpoint` holds, read without torch and without unpickling.

`read_dcp` reads `.metadata`: which tensors there are, and which bytes of which file hold each part
of them. Every number is checked against the others here, so that a reader
that follows them stays within the files and fills each tensor exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from parallel_ckpt.errors import CheckpointNotFound, DamagedCheckpoint
from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.checked_json import MAX_COUNT, is_count
from parallel_ckpt.formats.dtypes import TORCH_ITEM_BYTES
from parallel_ckpt.formats.limits import (
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_LOOSE_CHUNKS,
    MAX_METADATA_BYTES,
    MAX_NAME,
    shown,
)
from parallel_ckpt.formats.pickles import (
    Global,
    Made,
    MalformedPickle,
    Pairs,
    collector_paused,
    read_pickle,
)
from parallel_ckpt.formats.safetensors import is_file_name
from parallel_ckpt.formats.stored import Piece, StoredTensor
from parallel_ckpt.layout import DCP_METADATA


@dataclass(frozen=True)
class DcpFolder:
    """A checked reading of `.metadata`."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    """By key. Each piece is an archive of its own."""
    paths: Mapping[str, tuple[str, ...]]
    """Where each tensor sat in the nested state dict that was saved; its key alone when that is
    unknown."""
    objects: tuple[str, ...]
    """Keys of pickled values; nothing ever reads them."""

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors, sorted."""
        return sorted({piece.file for t in self.tensors.values() for piece in t.pieces})


def read_dcp(folder: Path) -> DcpFolder:
    """Read and check the `.metadata` of a DCP folder.

    Raises:
        CheckpointNotFound: the folder does not have one.
        DamagedCheckpoint: it is something else; the message says what was found.
    """
    path = folder / DCP_METADATA
    if not path.is_file():
        raise CheckpointNotFound.of(
            folder, f"does not hold {DCP_METADATA}, so it is not a DCP folder."
        )
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise DamagedCheckpoint.of(path, f"has more than {MAX_METADATA_BYTES} bytes.")
    return parse_metadata(path.read_bytes(), folder)


def parse_metadata(data: bytes, folder: Path) -> DcpFolder:
    """As `read_dcp`, from the bytes of the document."""
    try:
        with collector_paused():
            document = _fields(read_pickle(data, _is_allowed), "Metadata")
            return _Parser(document, folder).parse()
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

    def __init__(self, document: Mapping[str, Any], folder: Path) -> None:
        self._folder = folder
        self._entries = _text_map(document.get("state_dict_metadata"), "state_dict_metadata")
        sizes = self._sizes = _Sizes()
        self._stored = _stored_items(document.get("storage_data"), sizes)
        self._paths = _paths(document.get("planner_data"))
        self._num_chunks = 0
        self._files: dict[str, Path] = {}

    def parse(self) -> DcpFolder:
        tensors: dict[str, StoredTensor] = {}
        objects: list[str] = []
        for key, entry in self._entries.items():
            if _is_made(entry, "BytesStorageMetadata"):
                objects.append(key)
            else:
                tensors[key] = self._tensor(key, entry)
        _check_disjoint(tensors)
        paths = {key: self._paths.get(key, (key,)) for key in tensors}
        return DcpFolder(self._folder, tensors, paths, tuple(objects))

    def _tensor(self, key: str, entry: Any) -> StoredTensor:
        fields = _fields(entry, "TensorStorageMetadata")
        shape = _size(fields.get("size"))
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise MalformedPickle(f"does not have a list of chunks for {shown(key)}")
        self._num_chunks += len(chunks)
        if self._num_chunks > MAX_CHUNKS:
            raise MalformedPickle(f"has more than {MAX_CHUNKS} chunks")
        found = tuple(self._pieces(key, shape, chunks))
        _check_cover(key, shape, [piece.box for piece in found])
        return StoredTensor(_dtype(fields.get("properties")), shape, found)

    def _pieces(self, key: str, shape: tuple[int, ...], chunks: list[Any]) -> Iterator[Piece]:
        # There may be millions of chunks: whatever does not depend on the chunk is done before.
        stored, files, num_dims = self._stored.get(key, {}), self._files, len(shape)
        known, check = self._sizes.known.get, self._sizes.check
        for chunk in chunks:
            offsets_value, sizes_value = _values(chunk, "ChunkStorageMetadata", _CHUNK)
            offsets = known(id(offsets_value)) or check(offsets_value)
            sizes = known(id(sizes_value)) or check(sizes_value)
            if len(offsets) != num_dims or len(sizes) != num_dims:
                raise MalformedPickle(f"has a chunk of other dims than {shown(key)}")
            for offset, size, length in zip(offsets, sizes, shape, strict=True):
                if offset + size > length:
                    raise MalformedPickle(
                        f"has a chunk that leaves {shown(key)} of shape {shown(shape)}"
                    )
            if 0 in sizes:
                continue
            # A tensor that was saved whole is stored without an offset.
            info = stored.get(offsets) or stored.get(None)
            if info is None:
                raise MalformedPickle(
                    f"does not name the bytes of {shown(key)} at {shown(offsets)}"
                )
            name, begin, num_bytes = info
            # One Path for all pieces of a file: there may be a million of them.
            file = files.get(name)
            if file is None:
                file = files[name] = self._folder / name
            yield Piece(Box(offsets, sizes), file, begin, num_bytes, in_archive=True)


_Info = tuple[str, int, int]
_CHUNK = ["offsets", "sizes"]
_INDEX = ["fqn", "index", "offset"]
_INFO = ["relative_path", "offset", "length"]


class _Sizes:
    """Shapes and offsets that were looked at: a document mentions most of them several times."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, ...]] = {}
        """By the identity of the value, which the document keeps alive."""

    def check(self, value: Any) -> tuple[int, ...]:
        """As `_size`, once for each value."""
        found = self.known[id(value)] = _size(value)
        return found


def _stored_items(value: Any, sizes: _Sizes) -> dict[str, dict[tuple[int, ...] | None, _Info]]:
    """Where the bytes lie, by key and offset."""
    if not isinstance(value, Pairs):
        raise MalformedPickle("does not have storage_data")
    items: dict[str, dict[tuple[int, ...] | None, _Info]] = {}
    known, files = sizes.known.get, set[str]()
    for index, info in value:
        fqn, _, offset = _values(index, "MetadataIndex", _INDEX)
        if type(fqn) is not str or len(fqn) > MAX_NAME:
            raise MalformedPickle("has stored data without a key")
        of_key = items.get(fqn)
        if of_key is None:
            of_key = items[fqn] = {}
        at = None if offset is None else known(id(offset)) or sizes.check(offset)
        if at in of_key:
            raise MalformedPickle(f"has stored data of {shown(fqn)} twice")
        of_key[at] = _storage_info(info, fqn, files)
    return items


def _storage_info(value: Any, key: str, files: set[str]) -> _Info:
    """Where the bytes of a part lie; the names in `files` have been looked at."""
    file, begin, length = _values(value, "_StorageInfo", _INFO)
    # torch leaves the fourth field out unless it has a value.
    if len(value.state) != 3 and _fields(value, "_StorageInfo").get("transform_descriptors"):
        raise MalformedPickle(f"has {shown(key)} compressed or otherwise transformed")
    if type(file) is not str or file not in files:
        if not isinstance(file, str) or not is_file_name(file):
            raise MalformedPickle(f"has {shown(key)} in {shown(file)}, which is not in the folder")
        files.add(file)
    if not (is_count(begin) and is_count(length)):
        raise MalformedPickle(f"has {shown(key)} at impossible bytes")
    return file, begin, length


def _check_cover(key: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """All boxes together are the tensor: as many elements, and each belongs to one box."""
    covered = sum(box.volume for box in boxes)
    if covered != math.prod(shape):
        raise MalformedPickle(
            f"has {covered} of {math.prod(shape)} elements of {shown(key)} of shape "
            f"{shown(tuple(shape))}"
        )
    if boxes and not _is_grid(shape, boxes) and not are_disjoint(key, boxes):
        raise MalformedPickle(f"has overlapping chunks of {shown(key)}")


def _is_grid(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes are the cells that cutting each dim at some places gives.

    Every sharding of torch gives such a grid, and it is checked in one pass. Comparing all pairs
    would take hours for a file that was made for it.
    """
    if len({box.offsets for box in boxes}) != len(boxes):
        return False
    for dim, length in enumerate(shape):
        spans = {(box.offsets[dim], box.sizes[dim]) for box in boxes}
        starts = sorted({start for start, _ in spans})
        ends = dict(zip(starts, [*starts[1:], length], strict=True))
        if any(ends[start] != start + size for start, size in spans):
            return False
    return True


def are_disjoint(key: str, boxes: Sequence[Box]) -> bool:
    """Whether no two of the boxes of a tensor have an element in common.

    Raises:
        MalformedPickle: there are too many to compare.
    """
    if len(boxes) > MAX_LOOSE_CHUNKS:
        raise MalformedPickle(f"has {len(boxes)} chunks of {shown(key)} that do not form a grid")
    return not any(one.overlap(other) for i, one in enumerate(boxes) for other in boxes[:i])


def _check_disjoint(tensors: Mapping[str, StoredTensor]) -> None:
    """No byte is stored for two tensors: a small file cannot pose as a huge model."""
    of_file: dict[int, list[Piece]] = {}
    for tensor in tensors.values():
        for piece in tensor.pieces:
            # All pieces of a file share its Path, which takes long to hash and to compare.
            of_file.setdefault(id(piece.file), []).append(piece)
    for pieces in of_file.values():
        spans = sorted((piece.begin, piece.num_bytes) for piece in pieces)
        if any(begin + size > following for (begin, size), (following, _) in pairwise(spans)):
            raise MalformedPickle(
                f"has two tensors in the same bytes of {shown(pieces[0].file.name)}"
            )


def _paths(value: Any) -> dict[str, tuple[str, ...]]:
    """Paths in the nested state dict by key; anything else is left out."""
    paths: dict[str, tuple[str, ...]] = {}
    for key, path in value if isinstance(value, Pairs) else ():
        if isinstance(key, str) and isinstance(path, tuple) and 0 < len(path) <= 64:
            parts = [part for part in path if isinstance(part, str | int)]
            if len(parts) == len(path) and sum(len(str(part)) for part in parts) <= MAX_NAME:
                paths[key] = tuple(str(part) for part in parts)
    return paths


def _is_made(value: Any, name: str) -> bool:
    return isinstance(value, Made) and value.kind.name == name


def _values(value: Any, kind: str, names: list[str]) -> list[Any]:
    """The attributes `names` of an object of the class `kind`, None for one that is missing.

    Fast where it has just these, in this order, as torch writes them. Nothing is hashed there: a
    crafted key could take for ever.
    """
    if type(value) is Made and value.kind.name == kind:
        state = value.state
        if type(state) is Pairs and state.flat[::2] == names:
            return state.flat[1::2]
    fields = _fields(value, kind)
    return [fields.get(name) for name in names]


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of an object that the document makes of the class `kind`."""
    if not _is_made(value, kind) or not isinstance(value.state, Pairs) or len(value.state) > 16:
        raise MalformedPickle(f"has something else where a {kind} belongs")
    return _text_map(value.state, kind)


def _text_map(value: Any, where: str) -> dict[str, Any]:
    pairs = value.items if _is_made(value, "OrderedDict") else value
    if not isinstance(pairs, Pairs):
        raise MalformedPickle(f"does not have {where}")
    fields: dict[str, Any] = {}
    for key, item in pairs:
        if not isinstance(key, str) or len(key) > MAX_NAME or key in fields:
            raise MalformedPickle(f"has a key twice, or a key that is not text, in {where}")
        fields[key] = item
    return fields


def _size(value: Any) -> tuple[int, ...]:
    """A `torch.Size`: few dims, none negative, and a product that fits."""
    if type(value) is Made and value.kind.name == "Size" and len(value.args) == 1:
        (value,) = value.args
    if type(value) is tuple and len(value) <= MAX_DIMS:
        product = 1
        for dim in value:
            if type(dim) is not int or not 0 <= dim < MAX_COUNT:
                break
            product *= dim or 1
        else:
            if product < MAX_COUNT:
                return value
    raise MalformedPickle("has an impossible shape or offset")


def _dtype(properties: Any) -> str:
    """The first value in the state of `TensorProperties`."""
    state = properties.state if _is_made(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or dtype.name not in TORCH_ITEM_BYTES:
        raise MalformedPickle("has a tensor without a dtype")
    return dtype.name
