"""Reads the pictures of a dataset: from which file and at which time, for each frame and camera."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_config import ConfigError, Problem
from parallel_train.data.frames import Indices
from parallel_train.data.metadata import Metadata, VideoSpan, folder_error
from parallel_train.data.stats import Stats
from parallel_train.data.video import VideoFrames


class Cameras:
    """Reads frames of cameras by their index in the dataset.

    Args:
        metadata: Of the dataset.
        frame_index: Of every frame, its number in its episode: [frames]. The stored timestamps are
            no better than float32, which half an hour into an episode is too coarse to find
            pictures by; that frame k is at k / fps is checked when the dataset is opened.
        names: Cameras to read, by the policy's names.
        tolerance_s: How far a picture's time may lie from the frame's.

    Raises:
        ConfigError: no such camera, a format that is not read, or a missing file.
    """

    def __init__(
        self,
        metadata: Metadata,
        frame_index: npt.NDArray[np.int64],
        names: Sequence[str],
        tolerance_s: float,
    ) -> None:
        for name in names:
            _check(metadata, name)
        lengths = [episode.end - episode.first for episode in metadata.episodes]
        self._episode_of = np.repeat(np.arange(len(lengths)), lengths)
        self._metadata, self._frame_index = metadata, frame_index
        stored = metadata.stored_names
        names = [stored[name] for name in names]
        self.names = tuple(names)
        """By the dataset's names."""
        self.stats = {name: _stats(metadata, name) for name in names}
        """Per channel, of values in [0, 1]: arrays of shape [3, 1, 1]."""
        self._video = VideoFrames(metadata.root, metadata.spec.fps, tolerance_s) if names else None
        # A missing file must show now, not in the middle of the first epoch.
        for file in sorted({self._span(e, n).file for e in range(len(lengths)) for n in names}):
            assert self._video is not None
            self._video.check(file)

    def read(self, name: str, rows: Indices) -> Tensor:
        """Pictures of the frames `rows` (any shape): uint8 [*rows.shape, 3, height, width]."""
        assert self._video is not None
        # Padding repeats frames: each is decoded once, and the copies are laid out at the end.
        flat, back = np.unique(rows, return_inverse=True)
        spans = [self._span(episode, name) for episode in self._episode_of[flat].tolist()]
        starts = np.array([span.from_s for span in spans], dtype=np.float64)
        # Episodes lie one after another in a file: the time in the file is not the one in the
        # episode.
        times = starts + self._frame_index[flat] / self._metadata.spec.fps
        files = np.array([span.file for span in spans])
        images: list[npt.NDArray[np.uint8] | None] = [None] * len(flat)
        # By file, so that each one is passed through once per batch.
        for file in dict.fromkeys(files.tolist()):
            at = np.flatnonzero(files == file)
            for place, image in zip(at, self._video.read(file, times[at]), strict=True):
                images[place] = image
        # Every place is filled: the condition only tells mypy so.
        stacked = np.stack([image for image in images if image is not None])
        # [flat, 3, height, width] -> [*rows.shape, 3, height, width]
        return torch.from_numpy(stacked[back.reshape(rows.shape)])

    def _span(self, episode: int, name: str) -> VideoSpan:
        return self._metadata.episodes[episode].videos[name]


def _check(metadata: Metadata, name: str) -> None:
    known = metadata.policy_spec.cameras()
    if name not in known:
        raise ConfigError(
            Problem(
                "policy.cameras",
                f"names {name!r}, which {str(metadata.root)!r} does not have.",
                f"It has: {', '.join(known) or 'no camera'}; --dataset.rename OLD={name} gives one "
                "this name.",
            )
        )
    if metadata.policy_spec.features[name].dtype != "video":
        raise folder_error(
            metadata.root,
            f"camera {name!r} is stored as pictures inside of the parquet files; videos are read.",
            "Record or convert it with videos.",
        )


def _stats(metadata: Metadata, name: str) -> Stats:
    entry = metadata.stats.get(name)
    try:
        return Stats.from_plain(entry if isinstance(entry, dict) else {}, (3, 1, 1))
    except ValueError as error:
        raise folder_error(
            metadata.root,
            f"meta/stats.json: {name}: {error}.",
            "Compute its statistics with LeRobot's tools.",
        ) from error
