"""Shards to a folder in the format of `torch.distributed.checkpoint`, hashed as they are written.

`dcp.save` is not used: it plans in rounds over all ranks what every rank knows beforehand, and for
each tensor it takes most of a millisecond to write an archive that a template gives at once. Its
readers read what is written here.
"""

from __future__ import annotations

import pickle
import uuid
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.dcp_index import IN_ITEM, Row, index_bytes
from parallel_ckpt.formats.dcp_template import template_of
from parallel_ckpt.formats.hashing import HashingWriter
from parallel_ckpt.formats.limits import MAX_CHUNKS, MAX_METADATA_BYTES
from parallel_ckpt.formats.pickles import collector_paused
from parallel_ckpt.layout import DCP_INDEX, DCP_METADATA
from parallel_ckpt.save.safetensors import as_bytes
from parallel_ckpt.state.shards import Shard
from parallel_ckpt.state.torch_dtypes import torch_dtype, torch_name
from parallel_ckpt.store.manifest import FileRecord

BUFFER_BYTES = 1 << 18
"""Gathers the many small writes around the elements of small tensors."""
BLOCK_BYTES = 1 << 20
"""Written and summed at a time, so that the second of the two finds the bytes in the cache."""
THREADS = 2
"""Of writing per rank, each with a file of its own."""
THREADED_BYTES = 16 << 20
"""Below this a second file costs more than a second thread saves."""
VERSION = "1.0.0"
"""Of the format, as torch's readers know it."""


class Written(NamedTuple):
    """A box of a tensor that lies in a file. Plain values: all of them go to the main rank."""

    row: Row
    begin: int
    """Of the item that holds the elements."""
    num_bytes: int


@dataclass(frozen=True)
class Part:
    """What one rank has written of a DCP folder."""

    boxes: Sequence[Written]
    files: Mapping[str, tuple[int, str]]
    """Size and checksum by name."""


def write_part(folder: Path, shards: Mapping[str, Shard], rank: int) -> Part:
    """Write this rank's boxes (those that it owns); flushing is left to the caller. No collective.

    The `.metadata` that makes the folder readable is written by `finish` on one rank.

    Raises:
        OSError: the file system did not take a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shares = _shares(shards)
    names = [f"__{rank}_{i}.distcp" for i in range(len(shares))]

    def write(name: str, share: Sequence[str]) -> tuple[list[Written], tuple[int, str]]:
        with torch.no_grad(), HashingWriter(folder / name) as file:
            return _write_boxes(file, name, {key: shards[key] for key in share})

    if len(shares) > 1:
        with ThreadPoolExecutor(len(shares), thread_name_prefix="writing") as pool:
            written = list(pool.map(write, names, shares))
    else:
        written = list(map(write, names, shares))
    boxes = [box for of_file, _ in written for box in of_file]
    return Part(boxes, {name: record for name, (_, record) in zip(names, written, strict=True)})


def finish(folder: Path, parts: Sequence[Part]) -> dict[str, tuple[int, str]]:
    """Write `.metadata` and our index for what all ranks wrote; size and checksum by name.

    Nothing is flushed.

    Raises:
        CheckpointError: there is more of it than a reader would take.
    """
    num_chunks = sum(len(part.boxes) for part in parts)
    if num_chunks > MAX_CHUNKS:
        raise CheckpointError.of(
            folder,
            f"would hold {num_chunks:,} pieces of tensors, but up to {MAX_CHUNKS:,} are read.",
            "Shard over fewer ranks: raise dp_replicate.",
        )
    boxes = [box for part in parts for box in part.boxes]
    with collector_paused(), HashingWriter(folder / DCP_METADATA) as file:
        pickle.dump(_metadata(boxes), file)
    with HashingWriter(folder / DCP_INDEX) as index:
        index.write(index_bytes(box.row for box in boxes))
    size_bytes = max(file.size_bytes, index.size_bytes)
    if size_bytes > MAX_METADATA_BYTES:
        raise CheckpointError.of(
            folder / DCP_METADATA,
            f"has {size_bytes:,} bytes, but up to {MAX_METADATA_BYTES:,} are read.",
            "Shard over fewer ranks: raise dp_replicate.",
        )
    return {
        document.path.name: (document.size_bytes, document.checksum) for document in (file, index)
    }


def file_records(prefix: str, files: Mapping[str, tuple[int, str]]) -> list[FileRecord]:
    """Records of files that lie in the folder `prefix` of a checkpoint."""
    return [
        FileRecord(path=f"{prefix}/{name}", size_bytes=size_bytes, checksum=checksum)
        for name, (size_bytes, checksum) in files.items()
    ]


def _shares(shards: Mapping[str, Shard]) -> list[list[str]]:
    """The names of the boxes that each file takes, in order; none without boxes."""
    names = sorted(shards)
    num_bytes = {name: shards[name].local.nbytes for name in names}
    if sum(num_bytes.values()) < THREADED_BYTES or len(names) < THREADS:
        return [names] if names else []
    shares: list[list[str]] = [[] for _ in range(THREADS)]
    loads = [0] * THREADS
    for name in sorted(names, key=num_bytes.__getitem__, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(name)
        loads[lightest] += num_bytes[name]
    return [sorted(share) for share in shares if share]


def _write_boxes(
    file: HashingWriter, name: str, shards: Mapping[str, Shard]
) -> tuple[list[Written], tuple[int, str]]:
    out = _Gathering(file)
    boxes = []
    for key, shard in shards.items():
        begin, local = out.size_bytes, shard.local
        place = _write_item(out, local)
        box = (tuple(shard.shape), tuple(shard.offsets), tuple(local.shape))
        row = Row(key, torch_name(local.dtype), *box, name, *place)
        boxes.append(Written(row, begin, out.size_bytes - begin))
    out.flush()
    return boxes, (file.size_bytes, file.checksum)


def _write_item(out: _Gathering, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Write what `torch.save` writes for the tensor alone, without its storage around it.

    First byte, length and CRC32 of the elements, or of the item where they must be looked for.
    """
    begin = out.size_bytes
    template = template_of(torch_name(tensor.dtype), tuple(tensor.shape))
    if template is None:
        try:
            torch.save(tensor.cpu().contiguous().clone(), cast(IO[bytes], out))
        except RuntimeError as error:
            # A full disk surfaces from torch's zip writer as an assertion of its own.
            raise out.error or error from error
        return begin, out.size_bytes - begin, IN_ITEM
    out.write(template.head)
    crc32 = 0
    if template.num_bytes:
        elements = as_bytes(tensor).numpy().data
        for first in range(0, len(elements), BLOCK_BYTES):
            block = elements[first : first + BLOCK_BYTES]
            crc32 = zlib.crc32(block, crc32)
            out.write(block)
    out.write(template.tail(crc32))
    return begin + len(template.head), template.num_bytes, crc32


class _Gathering:
    """A file to write to in order, which takes small pieces together."""

    def __init__(self, file: HashingWriter) -> None:
        self.size_bytes = 0
        """Written so far, gathered or not."""
        self._file = file
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    @property
    def error(self) -> OSError | None:
        """Why a write failed."""
        return self._file.error

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data` and return its length."""
        num_bytes = len(data)
        if self._num_bytes + num_bytes > BUFFER_BYTES:
            self.flush()
        if num_bytes > BUFFER_BYTES:
            self._file.write(data)
        else:
            # A copy: what a view shows may change once the caller goes on.
            self._pieces.append(bytes(data))
            self._num_bytes += num_bytes
        self.size_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Hand all that is gathered to the file."""
        pieces, self._pieces, self._num_bytes = self._pieces, [], 0
        if pieces:
            self._file.write(b"".join(pieces))


def _metadata(boxes: Sequence[Written]) -> Metadata:
    """What torch's readers want to know of the folder."""
    tensors: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    # One object for all tensors of a dtype or a shape: it is pickled once, and named after that.
    properties = cache(lambda dtype: TensorProperties(dtype=torch_dtype(dtype)))
    size = cache(torch.Size)
    for row, begin, num_bytes in boxes:
        tensor = tensors.get(row.name)
        if tensor is None:
            tensor = TensorStorageMetadata(properties(row.dtype), size(row.shape), [])
            tensors[row.name] = tensor
        offsets = size(row.offsets)
        # The index is a hint: without it torch looks through all chunks of the tensor.
        index = MetadataIndex(row.name, offsets, len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(offsets, size(row.sizes)))
        stored[index] = _StorageInfo(row.file, begin, num_bytes)
    return Metadata(
        state_dict_metadata={**tensors},
        # torch's own offline tools ask for the path of each key in a nested state dict.
        planner_data={name: (name,) for name in tensors},
        storage_data=stored,
        # Without the absolute path of this machine, which torch's writer would leave there.
        storage_meta=StorageMeta(save_id=str(uuid.uuid4())),
        version=VERSION,
    )
