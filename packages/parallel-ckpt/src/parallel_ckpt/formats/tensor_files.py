"""The files that tensors lie in: which of a folder are meant, and reading from them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_ckpt.formats.dcp_item import MalformedItem, locate
from parallel_ckpt.formats.limits import shown
from parallel_ckpt.formats.safetensors import read_index
from parallel_ckpt.formats.stored import Piece
from parallel_ckpt.layout import SAFETENSORS_INDEX, is_weight_file


def safetensors_in(folder: Path) -> tuple[list[Path], Path | None]:
    """Files of weights in a folder that has no manifest, and their index where there is one.

    They are the files that the index names; without an index, all that have a weight file's name.

    Raises:
        DamagedCheckpoint: the index cannot be read.
    """
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(read_index(index).values()))], index
    return sorted(path for path in folder.iterdir() if is_weight_file(path.name)), None


class OpenFiles:
    """Files that are read from, each opened once. Several threads may share it."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def descriptor(self, path: Path) -> int:
        """Of a file that is opened for reading."""
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]

    @contextmanager
    def located(self, key: str, piece: Piece, dtype: str) -> Iterator[tuple[int, Piece]]:
        """An open file, and the piece by the bytes of its elements in it, for reading them.

        `key` names the tensor in errors.

        Raises:
            DamagedCheckpoint: locating, or the reading in this block, failed.
        """
        try:
            file = self.descriptor(piece.file)
            yield file, locate(file, piece, dtype)
        except FileNotFoundError as error:
            raise DamagedCheckpoint.of(
                piece.file, f"is missing; {shown(key)} lies in it."
            ) from error
        except (OSError, MalformedItem) as error:
            raise DamagedCheckpoint.of(
                piece.file, f"cannot be read at {shown(key)}: {error}."
            ) from error

    def close(self) -> None:
        """Close all; a file that is asked for again is opened anew."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()
