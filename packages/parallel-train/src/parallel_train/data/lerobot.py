"""Opens LeRobotDataset v3.0 folders as a torch dataset.

Everything that can be wrong with a folder is found when it is opened, before training, as one
clear error. Vectors are held in memory, so that a batch is cut out of them in one step.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from parallel_config import ConfigError, Problem
from parallel_train.data import frames
from parallel_train.data.cameras import Cameras
from parallel_train.data.columns import Column
from parallel_train.data.config import DatasetConfig
from parallel_train.data.frames import Indices
from parallel_train.data.metadata import Metadata, folder_error, read_metadata
from parallel_train.data.spec import DataSpec, Feature, is_learned
from parallel_train.data.stats import Stats, mode_of

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
        stats: "file" takes `meta/stats.json` and checks it against the frames and a sample of the
            pictures; "data" computes statistics from the chosen episodes, those of cameras from an
            even sample of their pictures.
        tolerance_s: How far a timestamp may lie from the frame it stands for; below half a frame.
        cameras: Videos to decode, by feature name; others are left unread.
        rename: The dataset's name to the policy's, where they differ.
        metadata: The `meta` folder of `root` where it has been read already, with `rename`.
        is_read: Whether the policy reads an observation or action of that (policy's) name; others
            may be damaged. None: all of them.
        is_normalized: Whether it normalizes what it reads under that name, cameras included;
            others may lack statistics. None: all of them.
        also: Episodes that `of_episodes` will ask for, beside `episodes`.

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
        is_read: Callable[[str], bool] | None = None,
        is_normalized: Callable[[str], bool] | None = None,
        also: Sequence[int] = (),
    ) -> None:
        if metadata is None:
            metadata = read_metadata(Path(root), rename)
        _check_tolerance(metadata, tolerance_s)
        self._is_read = is_read or is_learned
        needed = None if episodes is None else [*episodes, *also]
        loaded = frames.read_frames(metadata, needed, self._is_read)
        # Frame k at k / fps is what pictures are found by.
        frames.check_timestamps(metadata, loaded, tolerance_s=tolerance_s)
        self._frames = frames.select_frames(metadata, episodes)
        # On the chosen frames alone: leaving episodes out is how bad frames are dealt with.
        columns, self._present = loaded.columns, loaded.present
        frames.check_values(metadata, columns, self._frames, self._is_read)
        self.unreadable: Mapping[str, str] = loaded.left_out
        """Damaged columns that the policy does not read: by name, what is wrong."""
        self._cameras = Cameras(
            metadata,
            columns["frame_index"],
            cameras,
            tolerance_s,
            _places(metadata, needed),
            stored=loaded.places,
        )
        metadata = metadata.with_sizes(self._cameras.sizes)
        self.metadata = metadata
        # What is not read or not normalized can do without statistics.
        normalizes = is_normalized or (lambda name: True)
        self.stats: dict[str, Stats] = _statistics(
            metadata,
            loaded,
            self._frames,
            stats,
            lambda name: self._is_read(name) and normalizes(name),
        )
        """Of observation and action vectors, and of the cameras."""
        for name in self._cameras.names:
            demanded = normalizes(metadata.rename.get(name, name))
            found = self._cameras.statistics(name, self._frames, stats, demanded=demanded)
            self.stats |= {} if found is None else {name: found}
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
        cls,
        config: DatasetConfig,
        policy: FrameReader,
        metadata: Metadata | None = None,
        also: Sequence[int] = (),
    ) -> LeRobotDataset:
        """The dataset of a run, with the frames that its policy reads.

        `also` are episodes that `of_episodes` will ask for.

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
            is_read=getattr(policy, "reads", None),
            is_normalized=_normalizes(policy),
            also=also,
        )

    def of_episodes(self, episodes: Sequence[int]) -> LeRobotDataset:
        """Other episodes of the same data, with the same statistics and in the same memory.

        Raises:
            ConfigError: an episode that is not there, or that holds values that are not finite.
        """
        # Shallow: columns, pictures and statistics are those of the first.
        other = copy.copy(self)
        other._frames = frames.select_frames(self.metadata, episodes)
        if not self._present[other._frames].all():
            raise ValueError(f"episodes {list(episodes)} were not read: name them in `also`")
        frames.check_values(self.metadata, self._arrays(), other._frames, self._is_read)
        other.__dict__.pop("fingerprint", None)
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

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of what is trained on: tasks, numbers and sizes of the videos of the chosen episodes."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([self.fps, list(self.tasks)]).encode())
        frame_rows = torch.from_numpy(self._frames)
        for name in sorted(frames.learned(self.metadata, self._arrays(), self._is_read)):
            digest.update(name.encode())
            digest.update(self._columns[name][frame_rows].numpy().tobytes())
        for name in ("task_index", "episode_index"):
            digest.update(self._columns[name][frame_rows].numpy().tobytes())
        # Not their contents: reading all videos would take as long as a part of the training.
        for file, size in self._cameras.file_sizes(np.unique(self._first[self._frames])):
            digest.update(f"{file} {size}".encode())
        return digest.hexdigest()

    def _arrays(self) -> dict[str, Column]:
        return {name: column.numpy() for name, column in self._columns.items()}

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
    def camera_names(self) -> tuple[str, ...]:
        """Cameras that are decoded, by the dataset's names."""
        return self._cameras.names

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


def _check_tolerance(metadata: Metadata, tolerance_s: float) -> None:
    half_s = 0.5 / metadata.spec.fps
    if tolerance_s >= half_s:
        raise ConfigError(
            Problem(
                "dataset.tolerance_s",
                f"= {tolerance_s}, but at {metadata.spec.fps:g} fps frames are {2 * half_s:.4g} s "
                "apart: half of that or more would accept a neighbour's picture.",
                f"Use --dataset.tolerance_s below {half_s:.4g}.",
            )
        )


def _places(metadata: Metadata, numbers: Sequence[int] | None) -> list[int] | None:
    """Places of episodes in `metadata.episodes`."""
    if numbers is None:
        return None
    chosen = set(numbers)
    return [place for place, e in enumerate(metadata.episodes) if e.number in chosen]


def _normalizes(policy: FrameReader) -> Callable[[str], bool] | None:
    modes = getattr(policy, "normalization", None)
    return None if modes is None else lambda name: mode_of(name, modes()) != "identity"


def _statistics(
    metadata: Metadata,
    loaded: frames.Loaded,
    chosen: Indices,
    source: Literal["file", "data"],
    is_demanded: Callable[[str], bool],
) -> dict[str, Stats]:
    """Of vectors. Those that are not demanded are there where they are right."""
    if source == "file":
        return frames.file_stats(metadata, loaded, chosen, is_demanded)
    names = frames.learned(metadata, loaded.columns)
    found = {name: Stats.of(loaded.columns[name][chosen]) for name in names}
    return {name: stats for name, stats in found.items() if np.isfinite(stats.mean).all()}


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
