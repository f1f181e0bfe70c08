"""Reading a LeRobotDataset v3.0 folder: metadata, frames, action chunks, statistics.

Everything that can be wrong with a folder is found here, before training, as one clear error.
Vectors are held in memory as float32 arrays; a batch is cut out of them in one step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from parallel_config import ConfigError, Problem

VERSION = "v3.0"
TOLERANCE_S = 1e-4
"""How far a requested time may lie from a frame."""
_BOOKKEEPING = frozenset({"timestamp", "frame_index", "episode_index", "index", "task_index"})
Batch = dict[str, torch.Tensor]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Feature:
    """One column of a dataset."""

    dtype: str
    """float32, int64, video ..."""
    shape: tuple[int, ...]
    """Shape of one frame's value."""


@dataclass(frozen=True)
class Stats:
    """Statistics of one vector feature over all frames; each array has the feature's shape."""

    mean: Floats
    std: Floats
    min: Floats
    max: Floats


class LeRobotDataset(torch.utils.data.Dataset[Batch]):
    """Frames of a LeRobotDataset v3.0 folder, with windows of frames around each.

    Args:
        root: the folder.
        delta_timestamps: feature to times in seconds relative to the frame; the feature then has
            one more dim in front, and `<feature>_is_pad` says which entries lie outside of the
            episode (they repeat its first or last frame).
        episodes: numbers of the episodes to use; None takes all.

    Raises:
        ConfigError: the folder is no dataset, is damaged, or does not fit the request.
    """

    def __init__(
        self,
        root: str | Path,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        episodes: Sequence[int] | None = None,
    ) -> None:
        self.root = Path(root)
        info = _read_info(self.root)
        self.fps: int = info["fps"]
        self.features = _read_features(self.root, info)
        self.tasks = _read_tasks(self.root)
        self.episode_ranges = _read_episodes(self.root)
        table = _read_frames(self.root, info)
        self._columns = {
            name: _column(self.root, table, name, feature)
            for name, feature in self.features.items()
            if feature.dtype in ("float32", "float64", "int64", "bool")
        }
        _check_frames(self.root, table.num_rows, self.episode_ranges, self._columns)
        self.stats = _read_stats(self.root, self._columns)
        self.frames = _select(self.episode_ranges, episodes)
        self._windows = {
            name: _frame_deltas(self, name, times)
            for name, times in (delta_timestamps or {}).items()
        }
        self._first, self._end = _bounds(self.episode_ranges, table.num_rows)

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> Batch:
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The frames at `indices` as one batch: tensors of shape [len(indices), ...]."""
        rows = self.frames[np.asarray(indices, dtype=np.int64)]
        batch: Batch = {}
        for name, column in self._columns.items():
            if name not in self._windows:
                batch[name] = torch.from_numpy(column[rows])
                continue
            wanted = rows[:, None] + self._windows[name][None, :]
            first, end = self._first[rows][:, None], self._end[rows][:, None]
            inside = np.clip(wanted, first, end - 1)
            batch[name] = torch.from_numpy(column[inside])
            batch[f"{name}_is_pad"] = torch.from_numpy(wanted != inside)
        return batch

    def dim(self, name: str) -> int:
        """Width of a vector feature.

        Raises:
            ConfigError: there is no such feature, or it is no vector.
        """
        feature = self.features.get(name)
        if feature is None or len(feature.shape) != 1:
            found = "is missing" if feature is None else f"has shape {list(feature.shape)}"
            raise _error(
                self.root,
                f"feature {name!r} {found}, but a vector is needed. "
                f"Features: {', '.join(sorted(self.features))}.",
            )
        return feature.shape[0]


def _error(root: Path, message: str, remedy: str = "") -> ConfigError:
    return ConfigError(Problem("dataset.root", f"= {str(root)!r}: {message}", remedy))


def _read_json(root: Path, name: str) -> Any:
    path = root / "meta" / name
    if not root.is_dir():
        raise _error(root, "there is no such folder.", "Use --dataset.root with a dataset folder.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(
            root,
            f"meta/{name} cannot be read: {error.strerror}.",
            f"A LeRobotDataset {VERSION} folder holds meta/{name}; check the path and the copy.",
        ) from error
    except ValueError as error:
        raise _error(root, f"meta/{name} is no valid JSON: {error}.") from error


def _read_info(root: Path) -> dict[str, Any]:
    info = _read_json(root, "info.json")
    if not isinstance(info, dict):
        raise _error(root, "meta/info.json holds no mapping.")
    version = info.get("codebase_version")
    if version != VERSION:
        raise _error(
            root,
            f"its format is {version!r}, but {VERSION} is read.",
            "Convert it with LeRobot's own script: python -m "
            "lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id <name>.",
        )
    fps = info.get("fps")
    if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not fps > 0:
        raise _error(root, f"meta/info.json has fps = {fps!r}, but it is a positive number.")
    return info


def _read_features(root: Path, info: Mapping[str, Any]) -> dict[str, Feature]:
    features: dict[str, Feature] = {}
    declared = info.get("features")
    for name, entry in (declared if isinstance(declared, dict) else {}).items():
        try:
            features[name] = Feature(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
        except (KeyError, TypeError, ValueError):
            raise _error(root, f"meta/info.json: feature {name!r} has no dtype or shape.") from None
    missing = sorted((_BOOKKEEPING | {"action"}) - features.keys())
    if missing:
        raise _error(root, f"meta/info.json declares no feature {', '.join(missing)}.")
    return features


def _read_table(root: Path, relative: str) -> pa.Table:
    try:
        return pq.read_table(root / relative)
    except (OSError, pa.ArrowException) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise _error(root, f"{relative} {what}.", "Copy the dataset again.") from error


def _read_tables(root: Path, folder: str) -> pa.Table:
    files = sorted((root / folder).rglob("*.parquet"))
    if not files:
        raise _error(root, f"{folder} holds no parquet file.", "Copy the dataset again.")
    return pa.concat_tables(
        [_read_table(root, str(file.relative_to(root))) for file in files],
        promote_options="default",
    )


def _read_tasks(root: Path) -> dict[int, str]:
    table = _read_table(root, "meta/tasks.parquet")
    texts = next((n for n in ("task", "__index_level_0__") if n in table.column_names), None)
    if texts is None or "task_index" not in table.column_names:
        raise _error(root, "meta/tasks.parquet has no task_index and task text.")
    indices = table["task_index"].to_pylist()
    return dict(zip(indices, table[texts].to_pylist(), strict=True))


def _read_episodes(root: Path) -> dict[int, range]:
    table = _read_tables(root, "meta/episodes")
    names = ("episode_index", "dataset_from_index", "dataset_to_index")
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise _error(root, f"meta/episodes has no column {', '.join(missing)}.")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    episodes = {episode: range(first, end) for episode, first, end in rows}
    if not episodes:
        raise _error(root, "it has no episodes.")
    empty = [episode for episode, frames in episodes.items() if not frames]
    if empty:
        raise _error(root, f"episodes {empty[:10]} have no frames.", "Remove or record them again.")
    return episodes


def _read_frames(root: Path, info: Mapping[str, Any]) -> pa.Table:
    table = _read_tables(root, "data")
    declared = info.get("total_frames")
    if table.num_rows == 0:
        raise _error(root, "it has no frames.")
    if table.num_rows != declared:
        raise _error(
            root,
            f"data holds {table.num_rows} frames, but meta/info.json says {declared}.",
            "A data file is missing or superfluous: copy the dataset again.",
        )
    return table.sort_by("index")


def _column(root: Path, table: pa.Table, name: str, feature: Feature) -> npt.NDArray[Any]:
    if name not in table.column_names:
        raise _error(root, f"data has no column {name!r} that meta/info.json declares.")
    column = table[name].combine_chunks()
    width = int(np.prod(feature.shape))
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type):
        values = column.flatten().to_numpy(zero_copy_only=False)
    else:
        values = column.to_numpy(zero_copy_only=False)
    if values.size != table.num_rows * width:
        raise _error(
            root,
            f"feature {name!r} is declared with shape {list(feature.shape)}, but its data has "
            f"{values.size / max(table.num_rows, 1):g} values per frame.",
        )
    if name in _BOOKKEEPING:
        return values
    shaped = values.reshape(table.num_rows, *feature.shape)
    return shaped.astype(np.float32) if feature.dtype.startswith("float") else shaped


def _check_frames(
    root: Path, num_frames: int, episodes: Mapping[int, range], columns: Mapping[str, Any]
) -> None:
    if not np.array_equal(columns["index"], np.arange(num_frames)):
        raise _error(root, "column 'index' does not count the frames from 0 without gaps.")
    outside = [e for e, frames in episodes.items() if frames.start < 0 or frames.stop > num_frames]
    if outside:
        raise _error(root, f"episodes {outside[:10]} reach beyond the {num_frames} frames.")
    for name, column in columns.items():
        if column.dtype.kind != "f":
            continue
        bad = ~np.isfinite(column.reshape(num_frames, -1)).all(axis=1)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            episode, frame = columns["episode_index"][row], columns["frame_index"][row]
            raise _error(
                root,
                f"feature {name!r} is NaN or infinite in {int(bad.sum())} frames, first in "
                f"episode {episode}, frame {frame}.",
                "Mend or drop these episodes (--dataset.episodes does not help: the statistics "
                "are those of all frames).",
            )


def _read_stats(root: Path, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, Stats]:
    raw = _read_json(root, "stats.json")
    stats: dict[str, Stats] = {}
    for name, column in columns.items():
        if name in _BOOKKEEPING or column.dtype.kind != "f":
            continue
        entry = raw.get(name) if isinstance(raw, dict) else None
        if not isinstance(entry, dict):
            raise _error(root, f"meta/stats.json has no statistics of {name!r}.")
        stats[name] = _one_stats(root, name, entry, column)
    return stats


def _one_stats(root: Path, name: str, entry: Mapping[str, Any], column: npt.NDArray[Any]) -> Stats:
    values: dict[str, Floats] = {}
    for key in ("mean", "std", "min", "max"):
        try:
            values[key] = np.asarray(entry[key], dtype=np.float32).reshape(column.shape[1:])
        except (KeyError, TypeError, ValueError):
            raise _error(
                root, f"meta/stats.json: {name!r} has no {key} of shape {list(column.shape[1:])}."
            ) from None
    # Statistics of other data would normalize silently wrong.
    mean, spread = column.mean(axis=0, dtype=np.float64), column.std(axis=0, dtype=np.float64)
    scale = np.maximum(spread, 1e-3 + 1e-3 * np.abs(mean))
    if not (
        np.all(np.abs(values["mean"] - mean) <= 0.01 * scale)
        and np.all(np.abs(values["std"] - spread) <= 0.01 * scale)
    ):
        raise _error(
            root,
            f"meta/stats.json disagrees with the data of {name!r}.",
            "Recompute the statistics with the tool that wrote the dataset.",
        )
    return Stats(**values)


def _select(episodes: Mapping[int, range], wanted: Sequence[int] | None) -> npt.NDArray[np.int64]:
    chosen = sorted(episodes) if wanted is None else sorted(set(wanted))
    unknown = [episode for episode in chosen if episode not in episodes]
    if unknown:
        raise ConfigError(
            Problem(
                "dataset.episodes",
                f"= {list(wanted or ())}: the dataset has no episodes {unknown[:10]}.",
                f"It has {len(episodes)}, numbered {min(episodes)} to {max(episodes)}.",
            )
        )
    return np.concatenate([np.arange(r.start, r.stop) for r in (episodes[e] for e in chosen)])


def _frame_deltas(
    dataset: LeRobotDataset, name: str, times: Sequence[float]
) -> npt.NDArray[np.int64]:
    if name not in dataset.features:
        raise _error(dataset.root, f"delta_timestamps name {name!r}, which is no feature.")
    frames = np.asarray(times, dtype=np.float64) * dataset.fps
    rounded = np.rint(frames)
    if np.any(np.abs(frames - rounded) > TOLERANCE_S * dataset.fps):
        raise _error(
            dataset.root,
            f"delta_timestamps of {name!r} fall between frames at {dataset.fps} fps.",
            f"Use multiples of 1/{dataset.fps} s.",
        )
    return rounded.astype(np.int64)


def _bounds(
    episodes: Mapping[int, range], num_frames: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First frame, and frame after the last, of each frame's episode."""
    first, end = np.zeros(num_frames, np.int64), np.zeros(num_frames, np.int64)
    for frames in episodes.values():
        first[frames.start : frames.stop] = frames.start
        end[frames.start : frames.stop] = frames.stop
    return first, end
