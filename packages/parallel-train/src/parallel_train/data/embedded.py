"""Reads pictures that lie inside of the parquet files of a dataset (`dtype: image`).

A column of them holds the bytes of one PNG or JPEG file per frame. Parquet is read by row group, of
which LeRobot writes one per episode: those that were read last stay in memory, still encoded.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from parallel_config import ConfigError, Problem
from parallel_train.data.frames import Indices, Places, episode_of
from parallel_train.data.metadata import COPY, Metadata, folder_error

Images = npt.NDArray[np.uint8]
KEPT_BYTES = 2**30
"""Encoded pictures that a process keeps: below it, each row group is read once."""
_KEPT_FILES = 64


class StoredPictures:
    """Pictures of a dataset's frames, from wherever the frames were found.

    Args:
        metadata: Of the dataset.
        places: File and row of every frame.
    """

    def __init__(self, metadata: Metadata, places: Places) -> None:
        self._metadata, self._places = metadata, places
        self._files: OrderedDict[str, tuple[pq.ParquetFile, Indices]] = OrderedDict()
        self._groups: OrderedDict[tuple[str, str, int], pa.Array] = OrderedDict()
        self._kept = 0

    def __getstate__(self) -> dict[str, Any]:
        # A worker opens the files for itself.
        return {**self.__dict__, "_files": OrderedDict(), "_groups": OrderedDict(), "_kept": 0}

    def check(self, name: str, rows: Indices) -> tuple[int, int]:
        """Height and width of the camera's pictures, from the head of one per row group.

        Raises:
            ConfigError: a file or column is missing or damaged, a picture is not one of 8 bit and
                three colours, or their sizes differ.
        """
        first: tuple[tuple[int, int], int] | None = None
        for frame in self._first_of_groups(rows):
            size = self._opened(name, frame).size[::-1]
            if first is None:
                first = (size, frame)
            elif size != first[0]:
                height, width = first[0]
                raise folder_error(
                    self._metadata.root,
                    f"pictures of {name} are {height} x {width} in {self._where(first[1])}, but "
                    f"{size[0]} x {size[1]} in {self._where(frame)}.",
                    "Record them in one size, or choose episodes of one size: --dataset.episodes.",
                )
        assert first is not None, "there is no dataset without frames"
        return first[0]

    def read(self, name: str, rows: Indices) -> list[Images]:
        """Pictures of the frames `rows` [frames]: uint8 [3, height, width] each.

        Raises:
            ConfigError: one cannot be decoded, or has another size than declared.
        """
        height, width = self._metadata.spec.features[name].shape[:2]
        found = []
        for frame in rows.tolist():
            picture = self._opened(name, frame)
            if picture.size != (width, height):
                raise self._wrong(name, frame, f"is {picture.height} x {picture.width} pixels, but "
                                  f"the others are {height} x {width}")  # fmt: skip
            try:
                pixels = np.asarray(picture)
            except (OSError, ValueError, SyntaxError) as error:  # PIL's errors of damaged files
                raise self._wrong(name, frame, f"cannot be decoded: {error}") from error
            # [height, width, 3] -> [3, height, width]
            found.append(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        return found

    def file_sizes(self, rows: Indices) -> list[tuple[str, int]]:
        """Name and bytes of the files that hold the frames `rows`."""
        names = [self._places.files[number] for number in np.unique(self._places.file[rows])]
        return [(name, (self._metadata.root / name).stat().st_size) for name in sorted(names)]

    def _opened(self, name: str, frame: int) -> Any:
        """The picture with its head read, not decoded yet."""
        image = _import_pil()
        data = self._bytes(name, frame)
        try:
            picture = image.open(io.BytesIO(data))
        except (OSError, ValueError, SyntaxError) as error:
            raise self._wrong(name, frame, f"cannot be decoded: {error}") from error
        if picture.mode != "RGB":
            raise self._wrong(
                name, frame, f"has mode {picture.mode!r}: it is not a colour picture of 3 channels "
                "of 8 bit"
            )  # fmt: skip
        return picture

    def _bytes(self, name: str, frame: int) -> bytes:
        file, row = self._places.files[self._places.file[frame]], int(self._places.row[frame])
        ends = self._file(file)[1]
        group = int(np.searchsorted(ends, row, side="right"))
        held = self._group(file, name, group)
        start = 0 if group == 0 else int(ends[group - 1])
        value = held[row - start].as_py()
        if isinstance(value, dict):  # LeRobot's: the bytes, and where they came from
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise self._wrong(name, frame, "is empty, or a path in place of the bytes of a picture")
        return value

    def _group(self, file: str, name: str, group: int) -> pa.Array:
        key = (file, name, group)
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key]
        opened, _ = self._file(file)
        if name not in opened.schema_arrow.names:
            raise folder_error(
                self._metadata.root,
                f"{file} does not have the column {name!r} that meta/info.json declares.",
                COPY,
            )
        try:
            # No threads: workers are forked, and there are as many of them as cores already.
            table = opened.read_row_group(group, columns=[name], use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(file, error) from error
        held = table[name].combine_chunks()
        self._groups[key] = held
        self._kept += held.nbytes
        while self._kept > KEPT_BYTES and len(self._groups) > 1:
            _, oldest = self._groups.popitem(last=False)
            self._kept -= oldest.nbytes
        return held

    def _file(self, file: str) -> tuple[pq.ParquetFile, Indices]:
        """An open file, and the row after the last of each of its row groups."""
        if file not in self._files:
            try:
                # Mapped: forked workers would move one another's place in an ordinary file.
                opened = pq.ParquetFile(self._metadata.root / file, memory_map=True)
            except (OSError, pa.ArrowException) as error:
                raise self._unreadable(file, error) from error
            groups = range(opened.num_row_groups)
            counts = [opened.metadata.row_group(group).num_rows for group in groups]
            self._files[file] = (opened, np.cumsum(counts, dtype=np.int64))
            if len(self._files) > _KEPT_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(file)
        return self._files[file]

    def _first_of_groups(self, rows: Indices) -> Sequence[int]:
        """The first of `rows` in each row group."""
        found: dict[tuple[int, int], int] = {}
        for number in np.unique(self._places.file[rows]):
            _, ends = self._file(self._places.files[number])
            frames = rows[self._places.file[rows] == number]
            groups = np.searchsorted(ends, self._places.row[frames], side="right")
            for group, frame in zip(groups.tolist(), frames.tolist(), strict=True):
                found.setdefault((int(number), group), frame)
        return list(found.values())

    def _where(self, frame: int) -> str:
        file = self._places.files[self._places.file[frame]]
        return f"frame {frame} (of episode {episode_of(self._metadata, frame)}, in {file})"

    def _wrong(self, name: str, frame: int, message: str) -> ConfigError:
        return folder_error(
            self._metadata.root,
            f"the picture {name} of {self._where(frame)} {message}.",
            "Record it again, leave its episode out (--dataset.episodes with the others), or leave "
            "the camera out of --policy.cameras.",
        )

    def _unreadable(self, file: str, error: Exception) -> ConfigError:
        return folder_error(self._metadata.root, f"{file} cannot be read: {error}.", COPY)


def _import_pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            Problem(
                "policy.cameras",
                f": pictures inside of parquet files are read by Pillow, which cannot be imported "
                f"({error}).",
                'Install the extra: pip install "parallel-train[vision]".',
            )
        ) from error
    return Image
