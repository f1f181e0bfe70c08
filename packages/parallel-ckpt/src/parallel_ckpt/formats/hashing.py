"""Checksums of files, taken while they are written or by reading them once."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

HASH_NAME = "xxh3_128"
"""Recorded by name in each manifest. It finds damage. It does not protect against tampering."""
FLUSHING_THREADS = 4
READ_BYTES = 4 << 20
"""Bytes read at a time when a file is hashed."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What is known of a file that was written: enough to find out whether it is still the same."""

    path: str
    """Relative to the folder that it belongs to, with forward slashes."""
    size_bytes: int
    checksum: str
    """Hex digest of the hash named `HASH_NAME`."""


def new_hasher() -> xxhash.xxh3_128:
    """A hasher of the kind that manifests record."""
    return xxhash.xxh3_128()


def hash_bytes(data: bytes) -> str:
    """Hex checksum of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: str | os.PathLike[str]) -> str:
    """Hex checksum of a file, which is read once in pieces."""
    hasher = new_hasher()
    buffer = memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            hasher.update(buffer[:num_bytes])
    return hasher.hexdigest()


class HashingWriter(io.RawIOBase):
    """A file open for writing in order, which hashes what passes; it cannot seek."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self.size_bytes = 0
        self.error: OSError | None = None
        """Why a write failed: callers written in C++ raise something else in its place."""
        self._hasher = new_hasher()
        self._file: IO[bytes] = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()

    @property
    def checksum(self) -> str:
        """Hex checksum of everything written so far."""
        return self._hasher.hexdigest()

    def record(self, path: str) -> FileRecord:
        """Of what was written so far, as the file `path` of a folder."""
        return FileRecord(path=path, size_bytes=self.size_bytes, checksum=self.checksum)

    def write(self, data: Any) -> int:
        """Write all of `data` (any contiguous buffer) and return its length in bytes."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                written += self._file.write(view[written:])
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self.path))
            raise self.error from error
        self._hasher.update(view)
        self.size_bytes += len(view)
        return len(view)

    def writable(self) -> bool:
        """Always true."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self.size_bytes

    def fileno(self) -> int:
        """Descriptor of the file, for `os.fsync`."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; what was written is not flushed to disk by this."""
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def hashed_file(path: str | os.PathLike[str], *, flush: bool = True) -> Iterator[HashingWriter]:
    """Write a file in order; leaving the block flushes it to disk. A failure leaves a part.

    Without `flush` it is on disk once `flush_files` has been told of it.
    """
    with HashingWriter(path) as writer:
        yield writer
        if flush:
            os.fsync(writer.fileno())


def flush_files(paths: Iterable[Path]) -> None:
    """Flush files to disk that were written before, all after one another's writing.

    A file system takes many files at once far faster than each after its own writing.

    Raises:
        OSError: names the file that the disk did not take.
    """
    with ThreadPoolExecutor(FLUSHING_THREADS, thread_name_prefix="flushing") as pool:
        for _ in pool.map(_flush, paths):
            continue


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
