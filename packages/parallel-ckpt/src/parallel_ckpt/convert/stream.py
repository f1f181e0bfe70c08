"""Bytes of tensors from source files into new files, hashed on the way and read back once.

Each source file is read once, front to back, in blocks of a megabyte; each block is written where
it belongs. Two files pass at a time, so that checksums and disk wait less for each other. Tensors
that are cut along another dim than 0 are put together afterwards, one at a time in memory.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt.convert.cast import cast
from parallel_ckpt.convert.plan import OutputFile, OutputTensor
from parallel_ckpt.errors import CheckpointError, DamagedCheckpoint
from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.dtypes import ITEM_BYTES, num_bytes
from parallel_ckpt.formats.hashing import FileRecord, new_hasher
from parallel_ckpt.formats.limits import shown
from parallel_ckpt.formats.safetensors import read_header
from parallel_ckpt.formats.stored import Piece

BLOCK_BYTES = 1 << 20
"""Read at a time; a multiple of every item size, and small enough to stay in a core's cache."""
THREADS = 2
FLUSH_S = 0.1
"""Seconds between two flushes while files pass: the disk works meanwhile, not only at the end."""

Tick = Callable[[int], None]
"""Is called with the number of bytes that were just done."""


@dataclass(frozen=True, slots=True)
class Written:
    """A range of an output file and the checksum of what was written there."""

    file: str
    begin: int
    num_bytes: int
    checksum: str


def write_files(
    folder: Path, files: Sequence[OutputFile], records: Mapping[Path, FileRecord], tick: Tick
) -> list[Written]:
    """Write all files into `folder` and flush them to disk.

    The checksums in `records` are compared as the source files pass; a file without one is
    checked by the CRC of each of its tensors, where it has those.

    Raises:
        DamagedCheckpoint: a source file differs from what was recorded of it.
        CheckpointError: the disk is too small.
    """
    with ExitStack() as stack:
        targets = {file.name: stack.enter_context(_created(folder, file)) for file in files}
        raw: dict[Piece, str] = {}
        passing = stack.enter_context(ThreadPoolExecutor(THREADS))
        passes = [
            passing.submit(_pass_file, path, jobs, records.get(path), targets, raw, tick)
            for path, jobs in _by_source(files).items()
        ]
        _flush_meanwhile(passes, targets.values())
        written = [span for spans in _results(passes) for span in spans]
        for tensor in (tensor for file in files for tensor in file.tensors):
            if not tensor.source.is_streamable:
                written.append(_write_whole(tensor, targets[tensor.file], raw))
        for target in targets.values():
            os.fsync(target)
    return written


def read_back(
    folder: Path, files: Sequence[OutputFile], written: Sequence[Written], tick: Tick
) -> list[FileRecord]:
    """Re-open every file, compare names, shapes, dtypes and bytes; their records, in order.

    Raises:
        CheckpointError: the disk returns something else than was written.
    """
    return [_read_back(folder / file.name, file, written, tick) for file in files]


def _flush_meanwhile(passes: Sequence[Future[list[Written]]], targets: Iterable[int]) -> None:
    """Until all files have passed or one of them failed."""
    while wait(passes, timeout=FLUSH_S, return_when=FIRST_EXCEPTION).not_done:
        if any(running.done() and running.exception() for running in passes):
            return
        for target in targets:
            os.fdatasync(target)


def _results(passes: Sequence[Future[list[Written]]]) -> list[list[Written]]:
    """Of all of them; the first error stops those that have not begun."""
    try:
        return [running.result() for running in passes]
    except BaseException:
        for waiting in passes:
            waiting.cancel()
        raise


Job = tuple[Piece, OutputTensor]


def _by_source(files: Sequence[OutputFile]) -> dict[Path, list[Job]]:
    jobs: dict[Path, list[Job]] = {}
    for file in files:
        for tensor in file.tensors:
            for piece in tensor.source.pieces:
                jobs.setdefault(piece.file, []).append((piece, tensor))
    return {path: sorted(jobs[path], key=lambda job: job[0].begin) for path in sorted(jobs)}


def _pass_file(
    path: Path,
    jobs: Sequence[Job],
    record: FileRecord | None,
    targets: Mapping[str, int],
    raw: dict[Piece, str],
    tick: Tick,
) -> list[Written]:
    """Read a source file front to back; without a checksum, only the tensors in it."""
    written: list[Written] = []
    checksum = record.checksum if record is not None else None
    whole = new_hasher()
    hear = whole.update if checksum is not None else _ignore
    with _reading(path) as source:
        at = 0
        for piece, tensor in jobs:
            if checksum is not None:
                _pass_over(source, path, at, piece.begin, hear)
            if tensor.source.is_streamable:
                target = targets[tensor.file]
                written.append(_pass_piece(source, piece, tensor, target, hear, checksum, tick))
            else:
                raw[piece] = _hash_piece(source, piece, hear, checksum, tick)
            at = piece.begin + piece.num_bytes
        if checksum is not None:
            _pass_over(source, path, at, os.fstat(source).st_size, hear)
    if checksum is not None and whole.hexdigest() != checksum:
        raise DamagedCheckpoint.of(
            path, f"has checksum {whole.hexdigest()}; {checksum} was committed."
        )
    return written


def _pass_piece(
    source: int,
    piece: Piece,
    tensor: OutputTensor,
    target: int,
    hear: Callable[[memoryview], None],
    checksum: str | None,
    tick: Tick,
) -> Written:
    begin = tensor.begin + _first_byte(piece, tensor)
    at, crc = begin, 0
    digest = new_hasher()
    for block in _blocks(source, piece.file, piece.begin, piece.num_bytes):
        hear(block)
        if checksum is None and piece.crc32 is not None:
            crc = zlib.crc32(block, crc)
        result = cast(block, tensor.stored_dtype, tensor.dtype)
        digest.update(result)
        _write(target, result, at)
        at += len(result)
        tick(len(block))
    _check_crc(piece, tensor, crc, checksum)
    return Written(tensor.file, begin, at - begin, digest.hexdigest())


def _hash_piece(
    source: int,
    piece: Piece,
    hear: Callable[[memoryview], None],
    checksum: str | None,
    tick: Tick,
) -> str:
    digest, crc = new_hasher(), 0
    for block in _blocks(source, piece.file, piece.begin, piece.num_bytes):
        hear(block)
        digest.update(block)
        crc = zlib.crc32(block, crc) if checksum is None else crc
        tick(len(block))
    if checksum is None and piece.crc32 not in (None, crc):
        raise _crc_error(piece, crc)
    return digest.hexdigest()


def _check_crc(piece: Piece, tensor: OutputTensor, crc: int, checksum: str | None) -> None:
    if checksum is None and piece.crc32 not in (None, crc):
        raise _crc_error(piece, crc, shown(tensor.name))


def _crc_error(piece: Piece, crc: int, name: str = "a tensor") -> DamagedCheckpoint:
    return DamagedCheckpoint.of(
        piece.file,
        f"has CRC {crc:08x} at {name} (bytes {piece.begin} to "
        f"{piece.begin + piece.num_bytes}); {piece.crc32:08x} was stored.",
    )


def _write_whole(tensor: OutputTensor, target: int, raw: Mapping[Piece, str]) -> Written:
    """Put a tensor together from boxes of any form, cast it, and write it."""
    import numpy as np

    item = ITEM_BYTES[tensor.stored_dtype]
    # numpy has fewer dims than torch; those of one element do not move any byte.
    kept = [dim for dim, size in enumerate(tensor.source.shape) if size != 1]
    outer = _only(Box.whole(tensor.source.shape), kept)
    whole = np.empty(outer.sizes, f"<u{item}")
    for piece in tensor.source.pieces:
        flat = np.frombuffer(_read_piece(piece, raw[piece]), f"<u{item}")[piece.first :]
        box = _only(piece.box, kept)
        if piece.strides is None:
            part = flat.reshape(box.sizes)
        else:
            strides = tuple(piece.strides[dim] * item for dim in kept)
            part = np.lib.stride_tricks.as_strided(flat, box.sizes, strides, writeable=False)
        whole[box.within(outer)] = part
    data = whole.reshape(-1).view(np.uint8).data.cast("B")
    digest = new_hasher()
    at = tensor.begin
    for start in range(0, len(data), BLOCK_BYTES):
        result = cast(data[start : start + BLOCK_BYTES], tensor.stored_dtype, tensor.dtype)
        digest.update(result)
        _write(target, result, at)
        at += len(result)
    return Written(tensor.file, tensor.begin, at - tensor.begin, digest.hexdigest())


def _only(box: Box, dims: Sequence[int]) -> Box:
    return Box(tuple(box.offsets[dim] for dim in dims), tuple(box.sizes[dim] for dim in dims))


def _read_piece(piece: Piece, checksum: str) -> bytearray:
    data = bytearray(piece.num_bytes)
    with _reading(piece.file) as source:
        at = 0
        for block in _blocks(source, piece.file, piece.begin, piece.num_bytes):
            data[at : at + len(block)] = block
            at += len(block)
    digest = new_hasher()
    digest.update(data)
    if digest.hexdigest() != checksum:
        raise DamagedCheckpoint.of(piece.file, "changed while it was read.")
    return data


def _first_byte(piece: Piece, tensor: OutputTensor) -> int:
    """Where the rows of a piece begin in the tensor's bytes."""
    if not tensor.source.shape:
        return 0
    return piece.box.offsets[0] * num_bytes(tensor.dtype, tensor.source.shape[1:])


def _read_back(path: Path, file: OutputFile, written: Sequence[Written], tick: Tick) -> FileRecord:
    planned = {t.name: (t.dtype, t.source.shape, t.begin, t.num_bytes) for t in file.tensors}
    found = {
        name: (entry.dtype, entry.shape, entry.begin, entry.num_bytes)
        for name, entry in read_header(path).tensors.items()
    }
    spans = sorted((w for w in written if w.file == file.name), key=lambda w: w.begin)
    whole = new_hasher()
    is_right = planned == found
    with _reading(path) as source:
        at = len(file.header)
        _pass_over(source, path, 0, at, whole.update)
        for span in spans:
            digest = new_hasher()
            is_right = is_right and span.begin == at
            for block in _blocks(source, path, span.begin, span.num_bytes):
                whole.update(block)
                digest.update(block)
                tick(len(block))
            is_right = is_right and digest.hexdigest() == span.checksum
            at = span.begin + span.num_bytes
    if not is_right or at != file.size_bytes:
        raise CheckpointError.of(
            path, "reads back differently from what was written: the disk cannot be trusted."
        )
    return FileRecord(path=file.name, size_bytes=at, checksum=whole.hexdigest())


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise DamagedCheckpoint.of(path, f"cannot be read: {error.strerror}.") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _created(folder: Path, file: OutputFile) -> Iterator[int]:
    """A new file of its final size with its header, so that a full disk is found at once."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    descriptor = os.open(folder / file.name, flags, 0o666)
    try:
        _reserve(descriptor, file, folder)
        _write(descriptor, memoryview(file.header), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, file: OutputFile, folder: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, file.size_bytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CheckpointError.of(
                folder,
                f"does not have room for the {file.size_bytes:,} bytes of {file.name}.",
                "Give an --output on a larger disk.",
            ) from error
        os.ftruncate(descriptor, file.size_bytes)


_OF_THREAD = threading.local()


def _buffer() -> memoryview:
    """The one buffer of this thread: taking fresh memory for each piece costs more than reading."""
    if not hasattr(_OF_THREAD, "buffer"):
        _OF_THREAD.buffer = memoryview(bytearray(BLOCK_BYTES))
    return _OF_THREAD.buffer  # type: ignore[no-any-return]


def _blocks(source: int, path: Path, begin: int, length: int) -> Iterator[memoryview]:
    """Consecutive blocks of a file; each is valid until the next one is asked for."""
    buffer = _buffer()
    at, end = begin, begin + length
    while at < end:
        block = buffer[: min(len(buffer), end - at)]
        filled = 0
        while filled < len(block):
            count = os.preadv(source, [block[filled:]], at + filled)
            if count == 0:
                raise DamagedCheckpoint.of(path, f"ends at byte {at + filled}, before {end}.")
            filled += count
        at += len(block)
        yield block


def _pass_over(
    source: int, path: Path, begin: int, end: int, hear: Callable[[memoryview], None]
) -> None:
    for block in _blocks(source, path, begin, max(0, end - begin)):
        hear(block)


def _write(target: int, data: memoryview, at: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(target, data[written:], at + written)


def _ignore(block: memoryview) -> None:
    del block
