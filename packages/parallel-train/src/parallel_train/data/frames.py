"""Reads the numbers of a dataset into arrays in memory, and checks them against its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from parallel_config import ConfigError, Problem
from parallel_train.data.columns import DTYPES, Column, read_column, stored_shape
from parallel_train.data.metadata import (
    BOOKKEEPING,
    COPY,
    Episode,
    Metadata,
    folder_error,
    read_table,
)
from parallel_train.data.spec import is_learned
from parallel_train.data.stats import Stats

Indices = npt.NDArray[np.int64]
IsRead = Callable[[str], bool]
"""Whether a policy reads the feature of that (policy's) name."""


@dataclass(frozen=True)
class Places:
    """In which data file, and in which row of it, each frame was found."""

    files: tuple[str, ...]
    """Relative to the dataset's folder."""
    file: npt.NDArray[np.int32]
    """Place in `files`, -1 where a frame is not there: [frames]."""
    row: Indices
    """[frames]."""


@dataclass(frozen=True)
class Loaded:
    """The numbers of a dataset, by frame."""

    columns: dict[str, Column]
    """[frames] for the bookkeeping and [frames, *shape] otherwise; 0 where a frame is not there."""
    present: npt.NDArray[np.bool_]
    """Which frames were read: [frames]."""
    left_out: dict[str, str]
    """Columns that are not read and could not be: by name, why."""
    places: Places


def read_frames(
    metadata: Metadata, episodes: Sequence[int] | None = None, is_read: IsRead = is_learned
) -> Loaded:
    """Every column of numbers of the files that hold the frames of `episodes` (None: of all).

    A frame is known by its `index`, whatever file the metadata say that it lies in. Columns that
    the policy does not read are left out where they are damaged.

    Raises:
        ConfigError: a file, a frame or a column is missing, damaged, or of another shape than
            declared.
    """
    wanted = select_frames(metadata, episodes)
    reader = _Reader(metadata, is_read)
    chosen = None if episodes is None else set(episodes)
    named = [e.data_file for e in metadata.episodes if chosen is None or e.number in chosen]
    missing_files = [file for file in dict.fromkeys(named) if not reader.read(file, None)]
    if not reader.present[wanted].all():
        # An entry of meta/episodes may name another file: LeRobot's own reader takes all of them.
        for path in sorted((metadata.root / "data").rglob("*.parquet")):
            reader.read(path.relative_to(metadata.root).as_posix(), wanted)
    missing = wanted[~reader.present[wanted]]
    if missing.size:
        if missing_files:
            raise folder_error(metadata.root, f"{missing_files[0]} is missing.", COPY)
        held = int(reader.present.sum())
        raise folder_error(
            metadata.root,
            f"its data files hold {held} frames of the {metadata.num_frames} that meta/episodes "
            f"says: frame {missing[0]} (of episode {episode_of(metadata, missing[0])}) is in none "
            f"of them, nor are {missing.size - 1} others.",
            "Copy the dataset again, or leave the episode out: --dataset.episodes with the others.",
        )
    _check_numbering(metadata, reader.columns, reader.present)
    return Loaded(reader.columns, reader.present, reader.left_out, reader.places)


class _Reader:
    """Puts the rows of data files at their places."""

    def __init__(self, metadata: Metadata, is_read: IsRead) -> None:
        self._metadata, self._is_read = metadata, is_read
        self._files: list[str] = []
        count = metadata.num_frames
        self._features = {n: f for n, f in metadata.spec.features.items() if f.dtype in DTYPES}
        # Pages of zeros that are never written do not take memory: of a large dataset, only the
        # chosen episodes do.
        self.columns: dict[str, Column] = {
            name: np.zeros((count, *stored_shape(name, f)), DTYPES[f.dtype])
            for name, f in self._features.items()
        }
        self.present = np.zeros(count, np.bool_)
        self.left_out: dict[str, str] = {}
        self._file, self._row = np.full(count, -1, np.int32), np.zeros(count, np.int64)

    @property
    def places(self) -> Places:
        """Of the frames that were read."""
        return Places(tuple(self._files), self._file, self._row)

    def read(self, file: str, missing: Indices | None) -> bool:
        """Read a file, if it is there; with `missing`, only if it holds one of these frames."""
        if file in self._files or not (self._metadata.root / file).is_file():
            return file in self._files
        if missing is not None:
            held = read_table(self._metadata.root, file, ["index"])
            if "index" not in held.column_names or not np.isin(missing, held["index"]).any():
                return False
        self._files.append(file)
        table = read_table(self._metadata.root, file, list(self._features))
        rows = self._rows(table, file)
        for name, feature in list(self._features.items()):
            try:
                self.columns[name][rows] = read_column(self._metadata, table, file, name, feature)
            except ConfigError as error:
                if name in BOOKKEEPING or self._is_read(self._metadata.rename.get(name, name)):
                    raise
                self.left_out[name] = error.problems[0].message.partition(": ")[2]
                del self._features[name], self.columns[name]
        self.present[rows] = True
        self._file[rows], self._row[rows] = len(self._files) - 1, np.arange(len(rows))
        return True

    def _rows(self, table: pa.Table, file: str) -> Indices:
        """The index of each row, which no other row may have."""
        feature = self._features["index"]
        rows: Indices = read_column(self._metadata, table, file, "index", feature)
        outside = np.flatnonzero((rows < 0) | (rows >= len(self.present)))
        if outside.size:
            raise folder_error(
                self._metadata.root,
                f"{file} has a frame of index {rows[outside[0]]}, but meta/episodes has "
                f"{len(self.present)} frames.",
                COPY,
            )
        values, counts = np.unique(rows, return_counts=True)
        twice = values[(counts > 1) | self.present[values]]
        if twice.size:
            raise folder_error(
                self._metadata.root,
                f"frame {twice[0]} is there twice, the second time in {file} "
                f"({twice.size} such frames).",
                "Remove the file that was left over, or copy the dataset again.",
            )
        return rows


def episode_of(metadata: Metadata, frame: int) -> int:
    """The number of the episode that holds a frame."""
    return next(e.number for e in metadata.episodes if e.first <= frame < e.end)


def check_values(
    metadata: Metadata,
    columns: Mapping[str, Column],
    frames: Indices,
    is_read: IsRead = is_learned,
) -> None:
    """Every observation and action of `frames` that is read is a finite number.

    Raises:
        ConfigError: naming feature, episode and frame of the first that is not.
    """
    for name in learned(metadata, columns, is_read):
        values = columns[name][frames].reshape(len(frames), -1)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if bad.size:
            row = frames[bad[0]]
            entry = int(np.flatnonzero(~np.isfinite(values[bad[0]]))[0])
            episodes = np.unique(columns["episode_index"][frames[bad]]).tolist()
            raise folder_error(
                metadata.root,
                f"{name}[{entry}] is {values[bad[0], entry]} in episode "
                f"{columns['episode_index'][row]}, frame {columns['frame_index'][row]} "
                f"({bad.size} such frames, in episodes {episodes[:10]}).",
                "Correct the frames, or leave these episodes out: --dataset.episodes with the "
                "others and --dataset.stats data.",
            )


def check_timestamps(metadata: Metadata, loaded: Loaded, *, tolerance_s: float) -> None:
    """Frame `k` of an episode is at `k / fps` seconds.

    Raises:
        ConfigError: naming the first frame that is not.
    """
    columns = loaded.columns
    expected = columns["frame_index"] / metadata.spec.fps
    rounding = np.spacing(expected.astype(np.float32))  # timestamps are stored as float32
    # "not <=": NaN is refused too.
    near = np.abs(columns["timestamp"] - expected) <= tolerance_s + rounding
    far = np.flatnonzero(~near & loaded.present)
    if far.size:
        row = far[0]
        raise folder_error(
            metadata.root,
            f"frame {columns['frame_index'][row]} of episode {columns['episode_index'][row]} is at "
            f"{columns['timestamp'][row]:.6f} s, but at {metadata.spec.fps:g} fps it belongs at "
            f"{expected[row]:.6f} s ({far.size} such frames).",
            "Correct fps in meta/info.json, or allow more with --dataset.tolerance_s, below half a "
            f"frame ({0.5 / metadata.spec.fps:g} s).",
        )


def select_frames(metadata: Metadata, episodes: Sequence[int] | None) -> Indices:
    """Indices of the frames of the chosen episodes, ascending; None chooses all.

    Raises:
        ConfigError: an episode that the dataset does not have.
    """
    if episodes is None:
        return np.arange(metadata.num_frames)
    known = {episode.number: episode for episode in metadata.episodes}
    unknown = sorted(set(episodes) - known.keys())
    if unknown:
        raise ConfigError(
            Problem(
                "dataset.episodes",
                f"names {unknown[:10]}, but {str(metadata.root)!r} has {len(known)} episodes, "
                f"{min(known)} to {max(known)}.",
                "Use --dataset.episodes with numbers in that range.",
            )
        )
    chosen = sorted((known[number] for number in set(episodes)), key=lambda e: e.first)
    return np.concatenate([np.arange(episode.first, episode.end) for episode in chosen])


def file_stats(
    metadata: Metadata, loaded: Loaded, chosen: Indices, is_demanded: IsRead = is_learned
) -> dict[str, Stats]:
    """Statistics of observations and actions from `meta/stats.json`, checked against the frames.

    Of features that are not demanded, those that are right.

    Raises:
        ConfigError: demanded ones are missing or disagree with the frames.
    """
    stats: dict[str, Stats] = {}
    for name in learned(metadata, loaded.columns):
        try:
            stats[name] = stats_of_file(metadata, loaded, chosen, name)
        except ConfigError:
            if is_demanded(metadata.rename.get(name, name)):
                raise
    return stats


def stats_of_file(metadata: Metadata, loaded: Loaded, chosen: Indices, name: str) -> Stats:
    """Those of one feature.

    Raises:
        ConfigError: they are missing or disagree with the frames.
    """
    way = "Use --dataset.stats data to compute them from the frames."
    column, entry = loaded.columns[name], metadata.stats.get(name)
    if not isinstance(entry, dict):
        raise folder_error(
            metadata.root, f"meta/stats.json does not have statistics of {name}.", way
        )
    try:
        found = Stats.from_plain(entry, column.shape[1:])
    except ValueError as error:
        raise folder_error(metadata.root, f"meta/stats.json: {name}: {error}.", way) from error
    # stats.json covers all episodes. Where they were all read, they are compared; of some, only the
    # range can be.
    if loaded.present.all() and np.isfinite(column).all():
        wrong = found.disagreement(Stats.of(column))
    else:
        wrong = found.too_narrow(Stats.of(column[chosen]))
    if wrong:
        raise folder_error(metadata.root, f"meta/stats.json: {name}: {wrong}.", way)
    return found


def learned(
    metadata: Metadata, columns: Mapping[str, Column], is_read: IsRead = is_learned
) -> list[str]:
    """The float columns that are actions or observations under the policy's names, and are read."""
    floats = [name for name, column in columns.items() if column.dtype == np.float32]
    seen_as = {name: metadata.rename.get(name, name) for name in floats}
    return [n for n, seen in seen_as.items() if is_learned(seen) and is_read(seen)]


def episode_bounds(episodes: Sequence[Episode]) -> tuple[Indices, Indices]:
    """First frame of each frame's episode, and the frame after its last: two arrays [frames]."""
    lengths = [episode.end - episode.first for episode in episodes]
    first = np.repeat([episode.first for episode in episodes], lengths)
    end = np.repeat([episode.end for episode in episodes], lengths)
    return first, end


def _check_numbering(
    metadata: Metadata, columns: Mapping[str, Column], present: npt.NDArray[np.bool_]
) -> None:
    """`frame_index` counts the frames of an episode; the code relies on it."""
    first, _ = episode_bounds(metadata.episodes)
    lengths = [episode.end - episode.first for episode in metadata.episodes]
    count = np.arange(metadata.num_frames)
    expected = {
        "frame_index": count - first,
        "episode_index": np.repeat([e.number for e in metadata.episodes], lengths),
    }
    for name, values in expected.items():
        wrong = np.flatnonzero((columns[name] != values) & present)
        if wrong.size:
            raise folder_error(
                metadata.root,
                f"frame {wrong[0]} has {name} = {columns[name][wrong[0]]}, but meta/episodes "
                f"makes it {values[wrong[0]]}.",
                COPY,
            )
    tasks = columns["task_index"][present]
    if tasks.min() < 0 or tasks.max() >= len(metadata.spec.tasks):
        raise folder_error(
            metadata.root,
            f"task_index reaches {tasks.max()}, but meta/tasks.parquet has "
            f"{len(metadata.spec.tasks)} tasks.",
            COPY,
        )
