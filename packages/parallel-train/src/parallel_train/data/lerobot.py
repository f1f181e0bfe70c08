"""Opens LeRobotDataset v3.0 folders as a torch dataset.

Everything that can be wrong with a folder is found when it is opened, before training, as one
clear error. Vectors are held in memory, so that a batch is cut out of them in one step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from parallel_train.data import frames
from parallel_train.data.cameras import Cameras
from parallel_train.data.config import DatasetConfig
from parallel_train.data.frames import Indices
from parallel_train.data.metadata import Metadata, folder_error, read_metadata
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.data.stats import Stats

Batch = dict[str, Tensor]
Deltas = Mapping[str, Sequence[float]]
Mask = npt.NDArray[np.bool_]


class FrameReader(Protocol):
    """What the dataset needs to know of its reader; every `PolicyConfig` is one."""

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Videos to decode, by the reader's names."""
        ...

    def delta_timestamps(self, fps: float) -> dict[str, list[float]]:
        """Seconds relative to the sampled frame at which each feature is read."""
        ...


class LeRobotDataset(Dataset[Batch]):
    """Frames of a LeRobotDataset v3.0 folder, each with the frames around it that were asked for.

    Batches and statistics have the dataset's names. What the policy asks for and the `spec` that it
    is built for have the policy's; its preprocessor goes from the first to the second.

    Args:
        root: The folder that holds `meta/info.json`.
        delta_timestamps: By feature, seconds relative to the sampled frame. The feature then has
            a time dim in front, and `<feature>_is_pad` tells which entries lie outside of the
            episode; those repeat its first or last frame.
        episodes: Numbers of the episodes to use; None uses all.
        stats: "file" takes `meta/stats.json` and checks it against the frames; "data" computes
            statistics from the chosen episodes.
        tolerance_s: How far a timestamp may lie from the frame it stands for.
        cameras: Videos to decode, by feature name; others are left unread.
        rename: The dataset's name to the policy's, where they differ.
        metadata: The `meta` folder of `root` where it has been read already, with `rename`.

    Raises:
        ConfigError: the folder is not a dataset, is damaged, or does not fit what was asked for.
    """

    def __init__(
        self,
        root: str | Path,
        delta_timestamps: Deltas | None = None,
        episodes: Sequence[int] | None = None,
        *,
        stats: Literal["file", "data"] = "file",
        tolerance_s: float = 1e-4,
        cameras: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        if metadata is None:
            metadata = read_metadata(Path(root), rename)
        columns = frames.read_frames(metadata)
        # On all frames, also those of episodes that are left out: frame k at k / fps is what
        # pictures are found by.
        frames.check_timestamps(metadata, columns, tolerance_s=tolerance_s)
        self._frames = frames.select_frames(metadata, episodes)
        # On the chosen frames alone: leaving episodes out is how bad frames are dealt with.
        frames.check_values(metadata, columns, self._frames)
        self.metadata = metadata
        self._cameras = Cameras(metadata, columns["frame_index"], cameras, tolerance_s)
        vectors = (
            frames.file_stats(metadata, columns)
            if stats == "file"
            else {n: Stats.of(columns[n][self._frames]) for n in frames.learned(metadata, columns)}
        )
        self.stats: dict[str, Stats] = {**vectors, **self._cameras.stats}
        """Of every observation and action vector, and (always from the file) of the cameras."""
        stored = metadata.stored_names
        # What is in memory or is decoded; other features cannot be asked for.
        readable = [new for new, old in stored.items() if old in columns or new in cameras]
        self._offsets = {
            stored.get(name, name): _offsets(metadata, name, readable, deltas, tolerance_s)
            for name, deltas in (delta_timestamps or {}).items()
        }
        self._first, self._end = frames.episode_bounds(metadata.episodes)
        # Views on the same memory: `of_episodes` and forked workers share it.
        self._columns = {name: torch.from_numpy(column) for name, column in columns.items()}

    @classmethod
    def from_config(
        cls, config: DatasetConfig, policy: FrameReader, metadata: Metadata | None = None
    ) -> LeRobotDataset:
        """The dataset of a run, with the frames that its policy reads.

        Raises:
            ConfigError: as above.
        """
        if metadata is None:
            metadata = read_metadata(config.folder, config.rename)
        return cls(
            config.folder,
            policy.delta_timestamps(metadata.spec.fps),
            config.episodes,
            stats=config.stats,
            tolerance_s=config.tolerance_s,
            cameras=policy.camera_names,
            rename=config.rename,
            metadata=metadata,
        )

    def of_episodes(self, episodes: Sequence[int]) -> LeRobotDataset:
        """Other episodes of the same data, with the same statistics and in the same memory.

        Raises:
            ConfigError: an episode that is not there, or that holds values that are not finite.
        """
        # Shallow: columns, pictures and statistics are those of the first.
        other = copy.copy(self)
        other._frames = frames.select_frames(self.metadata, episodes)
        columns = {name: column.numpy() for name, column in self._columns.items()}
        frames.check_values(self.metadata, columns, other._frames)
        return other

    def check_range(self, name: str, low: float, high: float) -> None:
        """Check that the policy's feature `name` lies in [low, high] in every chosen frame.

        Raises:
            ConfigError: it does not, or it is not a column of numbers.
        """
        column = self._columns.get(self.metadata.stored_names.get(name, name))
        if column is None:
            raise folder_error(self.metadata.root, f"the column of numbers {name!r} is missing.")
        values = column.numpy()[self._frames].reshape(len(self._frames), -1)
        # Turned around so that NaN, for which every comparison is false, counts as bad.
        bad = np.flatnonzero(~((values >= low) & (values <= high)).all(axis=1))
        if bad.size:
            raise folder_error(
                self.metadata.root,
                f"{name} is {values[bad[0]].tolist()} in sample {bad[0]} ({bad.size} such frames), "
                f"but the policy reads it as numbers from {low:g} to {high:g}.",
                "Name another feature, or bring its values into that range.",
            )

    @property
    def spec(self) -> DataSpec:
        """What a model needs to know of the data, by the policy's names."""
        return self.metadata.policy_spec

    @property
    def features(self) -> Mapping[str, Feature]:
        """By name."""
        return self.spec.features

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.spec.fps

    @property
    def tasks(self) -> tuple[str, ...]:
        """Text of each task, by `task_index`."""
        return self.spec.tasks

    @property
    def num_frames(self) -> int:
        """Frames of the chosen episodes: the samples of an epoch."""
        return len(self._frames)

    @property
    def num_episodes(self) -> int:
        """Chosen episodes."""
        # An episode is known by its first frame.
        return len(np.unique(self._first[self._frames]))

    def __len__(self) -> int:
        return self.num_frames

    def __getitem__(self, sample: int) -> Batch:
        """One sample: vectors [dim], numbers 0-dim, pictures uint8 [3, height, width].

        Where deltas were asked for, a time dim comes first.
        """
        return {name: value[0] for name, value in self.__getitems__([sample]).items()}

    def __getitems__(self, samples: Sequence[int]) -> Batch:
        """A whole batch at once: like `__getitem__`, with a batch dim in front."""
        rows = self._frames[np.asarray(samples, dtype=np.int64)]
        batch: Batch = {}
        for name in (*self._columns, *self._cameras.names):
            if name not in self._offsets:
                batch[name] = self._values(name, rows)
                continue
            inside, outside = self._window(rows, self._offsets[name])
            batch[name] = self._values(name, inside)
            batch[f"{name}_is_pad"] = torch.from_numpy(outside)
        return batch

    def _values(self, name: str, rows: Indices) -> Tensor:
        if name in self._columns:
            return self._columns[name][torch.from_numpy(rows)]
        return self._cameras.read(name, rows)

    def _window(self, rows: Indices, offsets: Indices) -> tuple[Indices, Mask]:
        """Rows [batch, time] clamped to each sample's episode, and which had to be."""
        # [batch, 1] + [1, time] -> [batch, time]
        wanted = rows[:, None] + offsets[None, :]
        inside = np.clip(wanted, self._first[rows][:, None], self._end[rows][:, None] - 1)
        return inside, wanted != inside


def _offsets(
    metadata: Metadata,
    name: str,
    readable: Sequence[str],
    deltas: Sequence[float],
    tolerance_s: float,
) -> Indices:
    """Frames relative to the sampled one, from seconds."""
    fps = metadata.spec.fps
    if name not in readable:
        raise folder_error(
            metadata.root,
            f"the feature {name!r} is missing, of which the policy reads {len(deltas)} frames.",
            f"It has: {', '.join(sorted(readable))}.",
        )
    # i / fps is rounded: times fps it is near a whole number, not on it.
    exact = np.asarray(deltas, dtype=np.float64) * fps
    whole = np.rint(exact)
    between = np.flatnonzero(np.abs(exact - whole) / fps > tolerance_s)
    if between.size:
        raise folder_error(
            metadata.root,
            f"delta_timestamps of {name!r}: {deltas[between[0]]} s falls between two frames at "
            f"{fps:g} fps.",
            f"Use multiples of 1/{fps:g} s.",
        )
    return whole.astype(np.int64)
