"""Reads the numbers of a dataset into arrays in memory, and checks them against its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from parallel_config import ConfigError, Problem
from parallel_train.data.metadata import BOOKKEEPING, Episode, Metadata, folder_error, read_table
from parallel_train.data.spec import ACTION, Feature
from parallel_train.data.stats import Stats

Column = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
_DTYPES = {
    "float32": np.float32,
    "float64": np.float32,
    "int64": np.int64,
    "int32": np.int64,
    "bool": np.bool_,
}
"""Dtypes of info.json that are read, and what they become."""
_COPY = "Copy the dataset again."


def read_frames(metadata: Metadata) -> dict[str, Column]:
    """Every column of numbers, as [frames] for the bookkeeping and [frames, *shape] otherwise.

    Raises:
        ConfigError: a file or column is missing, damaged, or of another shape than declared.
    """
    wanted = {
        name: feature
        for name, feature in metadata.spec.features.items()
        if feature.dtype in _DTYPES
    }
    # In the order of the episodes, so that the parts join in the order of the frames.
    files = list(dict.fromkeys(episode.data_file for episode in metadata.episodes))
    parts = [_read_file(metadata, file, wanted) for file in files]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in wanted}
    found = len(columns["index"])
    if found != metadata.num_frames:
        raise folder_error(
            metadata.root,
            f"its data files hold {found} frames, but meta/episodes says {metadata.num_frames}.",
            _COPY,
        )
    _check_numbering(metadata, columns)
    return columns


def check_values(metadata: Metadata, columns: Mapping[str, Column], frames: Indices) -> None:
    """Every observation and action of `frames` is a finite number.

    Raises:
        ConfigError: naming feature, episode and frame of the first that is not.
    """
    for name in learned(metadata, columns):
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
                "Mend the frames, or leave these episodes out: --dataset.episodes with the "
                "others and --dataset.stats data.",
            )


def check_timestamps(
    metadata: Metadata, columns: Mapping[str, Column], *, tolerance_s: float
) -> None:
    """Frame `k` of an episode is at `k / fps` seconds.

    Raises:
        ConfigError: naming the first frame that is not.
    """
    expected = columns["frame_index"] / metadata.spec.fps
    rounding = np.spacing(expected.astype(np.float32))  # timestamps are stored as float32
    far = np.flatnonzero(np.abs(columns["timestamp"] - expected) > tolerance_s + rounding)
    if far.size:
        row = far[0]
        raise folder_error(
            metadata.root,
            f"frame {columns['frame_index'][row]} of episode {columns['episode_index'][row]} is at "
            f"{columns['timestamp'][row]:.6f} s, but at {metadata.spec.fps:g} fps it belongs at "
            f"{expected[row]:.6f} s ({far.size} such frames).",
            "Mend fps in meta/info.json, or allow more with --dataset.tolerance_s.",
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


def file_stats(metadata: Metadata, columns: Mapping[str, Column]) -> dict[str, Stats]:
    """Statistics of observations and actions from `meta/stats.json`, checked against the frames.

    Raises:
        ConfigError: they are missing or disagree with the frames.
    """
    way = "Use --dataset.stats data to compute them from the frames."
    stats: dict[str, Stats] = {}
    for name in learned(metadata, columns):
        entry = metadata.stats.get(name)
        if not isinstance(entry, dict):
            raise folder_error(
                metadata.root, f"meta/stats.json does not have statistics of {name}.", way
            )
        try:
            stats[name] = Stats.from_plain(entry, columns[name].shape[1:])
        except ValueError as error:
            raise folder_error(metadata.root, f"meta/stats.json: {name}: {error}.", way) from error
        # stats.json covers all episodes, so it is compared with all frames and not with the chosen
        # ones.
        disagreement = stats[name].disagreement(Stats.of(columns[name]))
        if disagreement:
            raise folder_error(metadata.root, f"meta/stats.json: {name}: {disagreement}.", way)
    return stats


def learned(metadata: Metadata, columns: Mapping[str, Column]) -> list[str]:
    """The float columns that are actions or observations under the policy's names."""
    floats = [name for name, column in columns.items() if column.dtype == np.float32]
    seen_as = {name: metadata.rename.get(name, name) for name in floats}
    return [n for n, seen in seen_as.items() if seen == ACTION or seen.startswith("observation.")]


def episode_bounds(episodes: Sequence[Episode]) -> tuple[Indices, Indices]:
    """First frame of each frame's episode, and the frame after its last: two arrays [frames]."""
    lengths = [episode.end - episode.first for episode in episodes]
    first = np.repeat([episode.first for episode in episodes], lengths)
    end = np.repeat([episode.end for episode in episodes], lengths)
    return first, end


def _read_file(metadata: Metadata, file: str, wanted: Mapping[str, Feature]) -> dict[str, Column]:
    table = read_table(metadata.root, file)
    return {name: _column(metadata, table, file, name, f) for name, f in wanted.items()}


def _column(metadata: Metadata, table: pa.Table, file: str, name: str, feature: Feature) -> Column:
    if name not in table.column_names:
        raise folder_error(
            metadata.root,
            f"{file} does not have the column {name!r} that meta/info.json declares.",
            _COPY,
        )
    column = table[name].combine_chunks()
    if column.null_count:
        raise folder_error(metadata.root, f"{file}: {name} is empty in {column.null_count} frames.")
    values, widths = _flat(column)
    # info.json declares [1] for these, and they are read as plain numbers.
    shape = () if name in BOOKKEEPING else feature.shape
    width = int(np.prod(shape, dtype=np.int64))
    # A file without rows has no widths to compare.
    if widths != {width} and table.num_rows:
        raise folder_error(
            metadata.root,
            f"feature {name!r} is declared with shape {list(feature.shape)}, but {file} holds "
            f"{' or '.join(str(w) for w in sorted(widths)[:5])} values per frame.",
            "Mend meta/info.json, or record again.",
        )
    return values.astype(_DTYPES[feature.dtype], copy=False).reshape(table.num_rows, *shape)


def _flat(column: Any) -> tuple[Column, set[int]]:
    """All values of a column one after another, and how many a frame has."""
    widths = {1}
    while pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type):
        lengths = set(pa.compute.list_value_length(column).to_pylist())
        # Lists may lie in lists: a matrix per frame.
        widths = {outer * inner for outer in widths for inner in lengths}
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False), widths


def _check_numbering(metadata: Metadata, columns: Mapping[str, Column]) -> None:
    """`index` counts all frames, `frame_index` those of an episode; the code relies on both."""
    first, _ = episode_bounds(metadata.episodes)
    lengths = [episode.end - episode.first for episode in metadata.episodes]
    count = np.arange(metadata.num_frames)
    expected = {
        "index": count,
        "frame_index": count - first,
        "episode_index": np.repeat([e.number for e in metadata.episodes], lengths),
    }
    for name, values in expected.items():
        wrong = np.flatnonzero(columns[name] != values)
        if wrong.size:
            raise folder_error(
                metadata.root,
                f"frame {wrong[0]} has {name} = {columns[name][wrong[0]]}, but meta/episodes "
                f"makes it {values[wrong[0]]}.",
                _COPY,
            )
    tasks = columns["task_index"]
    if tasks.min() < 0 or tasks.max() >= len(metadata.spec.tasks):
        raise folder_error(
            metadata.root,
            f"task_index reaches {tasks.max()}, but meta/tasks.parquet has "
            f"{len(metadata.spec.tasks)} tasks.",
            _COPY,
        )
