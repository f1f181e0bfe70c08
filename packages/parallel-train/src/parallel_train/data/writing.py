"""Writes a LeRobotDataset v3.0 folder of vectors and videos: for recorders and tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from parallel_train.data.encoding import (
    CODEC,
    KEY_FRAME_EVERY,
    Pictures,
    picture_stats,
    write_video,
)
from parallel_train.data.metadata import VERSION

VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


@dataclass(frozen=True)
class Episode:
    """One demonstration: arrays of shape [frames, state_dim] and [frames, action_dim]."""

    state: npt.NDArray[np.float32]
    action: npt.NDArray[np.float32]
    task: str
    images: Mapping[str, Pictures] = field(default_factory=dict)
    """By camera (observation.images.top): uint8 RGB of shape [frames, height, width, 3]."""


def write_dataset(
    root: Path,
    episodes: Sequence[Episode],
    *,
    fps: int,
    robot_type: str = "unknown",
    codec: str = CODEC,
    key_frame_every: int = KEY_FRAME_EVERY,
) -> None:
    """Write the folder. The same episodes give the same bytes with the same pyarrow.

    Pictures need PyAV (extra: vision). `codec` is one of its encoders; fewer key frames make
    smaller files, of which single frames take longer to read.

    Raises:
        ConfigError: there are pictures, and PyAV is not installed.
        ValueError: episodes have other cameras than the first, or pictures of odd sizes.
    """
    # The first episode decides: every episode of a dataset has the same features.
    cameras = list(episodes[0].images)
    for number, episode in enumerate(episodes):
        if list(episode.images) != cameras:
            raise ValueError(f"episode {number} has cameras {list(episode.images)}, not {cameras}")
    # Numbered in the order in which they first occur.
    tasks = list(dict.fromkeys(episode.task for episode in episodes))
    frames = [_frames(i, e, tasks.index(e.task), fps) for i, e in enumerate(episodes)]
    ends = np.cumsum([len(e.action) for e in episodes]).tolist()
    starts = [0, *ends[:-1]]
    for frame, start in zip(frames, starts, strict=True):
        # Only here are the lengths of the episodes before known.
        frame["index"] = frame["frame_index"] + start
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    columns = {name: np.concatenate([f[name] for f in frames]) for name in frames[0]}
    _write_frames(root / "data/chunk-000/file-000.parquet", columns, starts, ends)
    pq.write_table(_tasks(tasks), root / "meta/tasks.parquet")
    stats = {name: _stats(column) for name, column in columns.items()}
    for camera in cameras:
        parts = [episode.images[camera] for episode in episodes]
        path = VIDEO_PATH.format(video_key=camera, chunk_index=0, file_index=0)
        write_video(root / path, parts, fps=fps, codec=codec, key_frame_every=key_frame_every)
        stats[camera] = picture_stats(parts)
    _write_episodes(root, episodes, frames, ends, fps)
    _write_json(root / "meta/stats.json", stats)
    _write_json(root / "meta/info.json", _info(columns, episodes, tasks, fps, robot_type))


def _tasks(tasks: Sequence[str]) -> pa.Table:
    """A pandas data frame whose index are the texts, which is where LeRobot looks for them."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": tasks})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype}
        for name, kind, dtype in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    names = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [{**names, "metadata": {"encoding": "UTF-8"}}],
        "columns": [{**column, "metadata": None} for column in columns],
        "pandas_version": "2.0.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def _frames(index: int, episode: Episode, task: int, fps: int) -> dict[str, npt.NDArray[Any]]:
    count = len(episode.action)
    numbers = np.arange(count, dtype=np.int64)
    return {
        "observation.state": episode.state.astype(np.float32),
        "action": episode.action.astype(np.float32),
        "timestamp": (numbers / fps).astype(np.float32),
        "frame_index": numbers,
        "episode_index": np.full(count, index, np.int64),
        "index": numbers,
        "task_index": np.full(count, task, np.int64),
    }


def _write_frames(
    path: Path, columns: dict[str, npt.NDArray[Any]], starts: list[int], ends: list[int]
) -> None:
    arrays = {
        # Vectors as fixed-size lists, as LeRobot writes them.
        name: pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), column.shape[1])
        if column.ndim == 2
        else pa.array(column)
        for name, column in columns.items()
    }
    table = pa.table(arrays)
    with pq.ParquetWriter(path, table.schema, compression="zstd", compression_level=12) as writer:
        for start, end in zip(starts, ends, strict=True):  # one row group per episode
            writer.write_table(table.slice(start, end - start))


def _write_episodes(
    root: Path,
    episodes: Sequence[Episode],
    frames: Sequence[Mapping[str, npt.NDArray[Any]]],
    ends: list[int],
    fps: int,
) -> None:
    starts = [0, *ends[:-1]]
    # Everything goes into file 0 of chunk 0.
    zeros = [0] * len(episodes)
    table: dict[str, Any] = {
        "episode_index": list(range(len(episodes))),
        "tasks": [[e.task] for e in episodes],
        "length": [len(e.action) for e in episodes],
        "data/chunk_index": zeros,
        "data/file_index": zeros,
        "dataset_from_index": starts,
        "dataset_to_index": ends,
        "meta/episodes/chunk_index": zeros,
        "meta/episodes/file_index": zeros,
    }
    for camera in episodes[0].images:
        table |= {
            f"videos/{camera}/chunk_index": zeros,
            f"videos/{camera}/file_index": zeros,
            f"videos/{camera}/from_timestamp": [start / fps for start in starts],
            f"videos/{camera}/to_timestamp": [end / fps for end in ends],
        }
    # LeRobot's tools for editing compute the statistics of what is left from those of each episode.
    parts = [
        {name: _stats(column) for name, column in frame.items()}
        | {camera: picture_stats([images]) for camera, images in episode.images.items()}
        for frame, episode in zip(frames, episodes, strict=True)
    ]
    for name, entry in parts[0].items():
        table |= {f"stats/{name}/{key}": [part[name][key] for part in parts] for key in entry}
    pq.write_table(pa.table(table), root / "meta/episodes/chunk-000/file-000.parquet")


def _stats(column: npt.NDArray[Any]) -> dict[str, Any]:
    # [frames] -> [frames, 1], so that a plain number has statistics of shape [1]
    values = column.reshape(len(column), -1).astype(np.float64)
    quantiles = {f"q{q:02d}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
    found = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([len(values)]),
        **quantiles,
    }
    return {name: value.tolist() for name, value in found.items()}


def _info(
    columns: dict[str, npt.NDArray[Any]],
    episodes: Sequence[Episode],
    tasks: list[str],
    fps: int,
    robot_type: str,
) -> dict[str, Any]:
    features: dict[str, dict[str, Any]] = {
        name: {
            "dtype": str(column.dtype),
            # LeRobot declares plain numbers as [1].
            "shape": list(column.shape[1:]) or [1],
            "names": None,
        }
        for name, column in columns.items()
    }
    for camera, pictures in episodes[0].images.items():
        names = ["height", "width", "channels"]
        features[camera] = {"dtype": "video", "shape": list(pictures.shape[1:]), "names": names}
    return {
        "codebase_version": VERSION,
        "robot_type": robot_type,
        "total_episodes": len(episodes),
        "total_frames": len(columns["index"]),
        "total_tasks": len(tasks),
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if episodes[0].images else None,
        "features": features,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
