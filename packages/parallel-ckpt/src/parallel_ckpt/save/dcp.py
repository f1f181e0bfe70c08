"""Shards to a folder in the format of `torch.distributed.checkpoint`, hashed as they are written.

The parts of `dcp.save` are used one by one: who writes what is known on every rank beforehand, so
one gather of results replaces its rounds of planning, and an error of one rank stays an ordinary
exception that our own agreement spreads.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.hashing import HashingWriter
from parallel_ckpt.formats.limits import MAX_CHUNKS, MAX_METADATA_BYTES
from parallel_ckpt.layout import DCP_METADATA
from parallel_ckpt.state.shards import Shard
from parallel_ckpt.store.manifest import FileRecord

BUFFER_BYTES = 1 << 18
"""Gathers the many small writes of torch's archives."""
THREADS = 2
"""Of writing per rank; measured: two give about three times what one gives."""


@dataclass(frozen=True)
class Part:
    """What one rank has written of a DCP folder."""

    plan: SavePlan
    results: Sequence[WriteResult]
    files: Mapping[str, tuple[int, str]]
    """Size and checksum by name."""


def write_part(folder: Path, shards: Mapping[str, Shard], rank: int) -> Part:
    """Write this rank's boxes (those that it owns); flushing is left to the caller. No collective.

    The `.metadata` that makes the folder readable is written by `finish` on one rank.

    Raises:
        CheckpointError: a writing thread failed.
        OSError: the file system did.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = SavePlan([_item(name, shard) for name, shard in sorted(shards.items())])
    if not plan.items:
        return Part(plan, (), {})
    writer, files = _writer(folder, min(THREADS, len(plan.items)))
    writer.set_up_storage_writer(is_coordinator=False)
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    try:
        with _quiet_writing_threads():
            results = writer.write_data(plan, _Planner(shards)).wait()
    except Exception as error:
        # A full disk surfaces from torch's zip writer as an assertion of its own.
        raise files.error or error from error
    if len(results) != len(plan.items):
        # torch drops exceptions of its writing threads; only the count tells.
        raise files.error or CheckpointError.of(
            folder, f"took {len(results)} of {len(plan.items)} tensors of rank {rank}."
        )
    return Part(SavePlan(plan.items), results, files.records)


def finish(folder: Path, parts: Sequence[Part]) -> dict[str, tuple[int, str]]:
    """Write `.metadata` for what all ranks wrote; size and checksum of it by name. Not flushed.

    Raises:
        CheckpointError: there is more of it than a reader would take.
    """
    num_chunks = sum(len(part.plan.items) for part in parts)
    if num_chunks > MAX_CHUNKS:
        raise CheckpointError.of(
            folder,
            f"would hold {num_chunks:,} pieces of tensors, but up to {MAX_CHUNKS:,} are read.",
            "Shard over fewer ranks: raise dp_replicate.",
        )
    plans, metadata = create_default_global_save_plan([part.plan for part in parts])
    hints = {item.index: item.index for plan in plans for item in plan.items}
    results = [_with_hints(part.results, hints) for part in parts]
    # torch's own offline tools ask for the path of each key in a nested state dict.
    metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
    writer, files = _writer(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, results)
    size_bytes = files.records[DCP_METADATA][0]
    if size_bytes > MAX_METADATA_BYTES:
        raise CheckpointError.of(
            folder / DCP_METADATA,
            f"has {size_bytes:,} bytes, but up to {MAX_METADATA_BYTES:,} are read.",
            "Shard over fewer ranks: raise dp_replicate.",
        )
    return files.records


def file_records(prefix: str, files: Mapping[str, tuple[int, str]]) -> list[FileRecord]:
    """Records of files that lie in the folder `prefix` of a checkpoint."""
    return [
        FileRecord(path=f"{prefix}/{name}", size_bytes=size_bytes, checksum=checksum)
        for name, (size_bytes, checksum) in files.items()
    ]


class _Writer(FileSystemWriter):
    """torch's writer, less the absolute path of this machine that it would leave in `.metadata`."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _HashingFiles(FileSystem):
    """torch's file system with a record of every file written through it."""

    def __init__(self) -> None:
        self.records: dict[str, tuple[int, str]] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with self._noting_errors(), HashingWriter(path) as file:
            try:
                stream = io.BufferedWriter(file, BUFFER_BYTES)
                yield stream
                if not stream.closed:
                    stream.flush()
            finally:
                self.error = self.error or file.error
            self.records[Path(path).name] = (file.size_bytes, file.checksum)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


@contextmanager
def _quiet_writing_threads() -> Iterator[None]:
    """Keep the traceback of torch's writing threads from the console: we raise their error."""
    former = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.thread is None or not _is_writing(args.thread):
            former(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        # An error in this thread does not make torch wait for the others.
        for thread in filter(_is_writing, threading.enumerate()):
            thread.join()
        threading.excepthook = former


def _is_writing(thread: threading.Thread) -> bool:
    return "_write_files_from_queue" in thread.name


class _Planner(DefaultSavePlanner):
    """Hands the writer the local memory of each planned box."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        super().__init__()
        self._shards = shards

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._shards[write_item.index.fqn].local.contiguous()


def _writer(folder: Path, threads: int = 1) -> tuple[FileSystemWriter, _HashingFiles]:
    writer = _Writer(folder, sync_files=False, thread_count=threads)
    files = _HashingFiles()
    writer.fs = files
    return writer, files


def _item(name: str, shard: Shard) -> WriteItem:
    offsets, sizes = torch.Size(shard.box.offsets), torch.Size(shard.box.sizes)
    properties = TensorProperties(dtype=shard.local.dtype)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=properties,
            size=torch.Size(shard.shape),
        ),
    )


def _with_hints(results: Sequence[WriteResult], hints: Mapping[Any, Any]) -> list[WriteResult]:
    return [
        WriteResult(hints[result.index], result.size_in_bytes, result.storage_data)
        for result in results
    ]
