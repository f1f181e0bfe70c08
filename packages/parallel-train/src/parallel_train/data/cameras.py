"""Reads the pictures of a dataset: from which file and at which time, for each frame and camera."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_config import ConfigError, Problem
from parallel_train.data.embedded import StoredPictures
from parallel_train.data.frames import Indices, Places
from parallel_train.data.metadata import Metadata, VideoSpan, folder_error
from parallel_train.data.pictures import FEW, MANY, PictureSample
from parallel_train.data.stats import Stats
from parallel_train.data.video import Span, VideoFrames

_SHOWN = 10


class Cameras:
    """Reads frames of cameras by their index in the dataset.

    Args:
        metadata: Of the dataset.
        frame_index: Of every frame, its number in its episode: [frames]. The stored timestamps are
            no better than float32, which half an hour into an episode is too coarse to find
            pictures by; that frame k is at k / fps is checked when the dataset is opened.
        names: Cameras to read, by the policy's names.
        tolerance_s: How far a picture's time may lie from the frame's.
        episodes: Places in `metadata.episodes` of those that may be read; None means all.
        stored: Where frames lie, for pictures inside of the parquet files.

    Raises:
        ConfigError: no such camera, a format that is not read, or a file that is missing, damaged,
            too short or of another size than the others.
    """

    def __init__(
        self,
        metadata: Metadata,
        frame_index: npt.NDArray[np.int64],
        names: Sequence[str],
        tolerance_s: float,
        episodes: Sequence[int] | None = None,
        *,
        stored: Places | None = None,
    ) -> None:
        for name in names:
            _check(metadata, name)
        lengths = [episode.end - episode.first for episode in metadata.episodes]
        self._episode_of = np.repeat(np.arange(len(lengths)), lengths)
        self._metadata, self._frame_index = metadata, frame_index
        names = [metadata.stored_names[name] for name in names]
        self.names = tuple(names)
        """By the dataset's names."""
        self._video = VideoFrames(metadata.root, metadata.spec.fps, tolerance_s) if names else None
        self._stored = None if stored is None else StoredPictures(metadata, stored)
        self._episodes = range(len(lengths)) if episodes is None else sorted(set(episodes))
        # A file that is missing or too short must show now, not in the middle of the first epoch.
        self.sizes = {name: self._checked_size(name) for name in self.names}
        """Height and width of the pictures, from the videos."""

    def statistics(
        self, name: str, chosen: Indices, source: Literal["file", "data"], *, demanded: bool
    ) -> Stats | None:
        """Per channel, of values in [0, 1]: arrays of shape [3, 1, 1].

        "file" takes those of `meta/stats.json` and compares them with a sample of the pictures;
        "data" computes them from a larger one, of the frames `chosen`. None where they are not
        `demanded` and not there.

        Raises:
            ConfigError: they are demanded, and missing or not those of the pictures.
        """
        read = partial(self._bytes, name)
        if source == "data":
            # Decoding takes time, and what is not normalized does not need them.
            return PictureSample.of(read, chosen, MANY).stats if demanded else None
        try:
            stats = _file_stats(self._metadata, name)
            rows = self._rows()
            sample = PictureSample.of(read, rows, FEW)
            wrong = sample.disagreement(stats, of_all=len(rows) == self._metadata.num_frames)
            if wrong:
                raise _stats_error(self._metadata, name, wrong)
        except ConfigError:
            if demanded:
                raise
            return None
        return stats

    def file_sizes(self, firsts: Indices) -> list[tuple[str, int]]:
        """Name and bytes of the files that hold the episodes which begin at the frames `firsts`."""
        places = self._episode_of[firsts].tolist()
        videos = [name for name in self.names if not self._is_stored(name)]
        files = sorted({self._span(place, name).file for place in places for name in videos})
        found = [(file, (self._metadata.root / file).stat().st_size) for file in files]
        if len(videos) < len(self.names):
            found += self._of_parquet.file_sizes(firsts)
        return found

    def _rows(self) -> Indices:
        episodes = [self._metadata.episodes[place] for place in self._episodes]
        return np.concatenate([np.arange(e.first, e.end) for e in episodes])

    def _bytes(self, name: str, rows: Indices) -> npt.NDArray[np.uint8]:
        return self.read(name, rows).numpy()

    def _checked_size(self, name: str) -> tuple[int, int]:
        """The size of a camera's pictures; each of its files is compared with its episodes."""
        if self._is_stored(name):
            return self._of_parquet.check(name, self._rows())
        assert self._video is not None
        spans: dict[str, list[Span]] = {}
        for place in self._episodes:
            episode = self._metadata.episodes[place]
            file, from_s = episode.videos[name].file, episode.videos[name].from_s
            span = Span(episode.number, from_s, episode.end - episode.first)
            spans.setdefault(file, []).append(span)
        sizes: dict[str, tuple[int, int]] = {}
        problems: list[Problem] = []
        for file, part in sorted(spans.items()):
            try:
                sizes[file] = self._video.check(file, part)
            except ConfigError as error:
                problems += error.problems
        if problems:
            # All at once, but a folder that was not copied is not a thousand lines.
            raise ConfigError(problems[:_SHOWN])
        (first, size), *others = sizes.items()
        for file, other in others:
            if other != size:
                raise folder_error(
                    self._metadata.root,
                    f"pictures of {name} are {size[0]} x {size[1]} in {first}, but {other[0]} x "
                    f"{other[1]} in {file}.",
                    "Record them in one size, or choose episodes of one size: --dataset.episodes.",
                )
        return size

    def read(self, name: str, rows: Indices) -> Tensor:
        """Pictures of the frames `rows` (any shape): uint8 [*rows.shape, 3, height, width]."""
        # Padding repeats frames: each is decoded once, and the copies are laid out at the end.
        flat, back = np.unique(rows, return_inverse=True)
        found = (
            self._of_parquet.read(name, flat)
            if self._is_stored(name)
            else (self._decoded(name, flat))
        )
        # [flat, 3, height, width] -> [*rows.shape, 3, height, width]
        return torch.from_numpy(np.stack(found)[back.reshape(rows.shape)])

    def _decoded(self, name: str, flat: Indices) -> list[npt.NDArray[np.uint8]]:
        """Pictures of the frames `flat`, in their order, from the videos."""
        assert self._video is not None
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
        return [image for image in images if image is not None]

    def _is_stored(self, name: str) -> bool:
        return self._metadata.spec.features[name].dtype == "image"

    @property
    def _of_parquet(self) -> StoredPictures:
        assert self._stored is not None, "such pictures are read where frames are"
        return self._stored

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
    height, width, *channels = metadata.policy_spec.features[name].shape
    if channels != [3]:
        raise folder_error(
            metadata.root,
            f"camera {name!r} is declared with shape {[height, width, *channels]}: it is not a "
            "colour picture of 3 channels.",
            "Leave it out of --policy.cameras; depth maps are not read as colour.",
        )


def _file_stats(metadata: Metadata, name: str) -> Stats:
    entry = metadata.stats.get(name)
    if not isinstance(entry, dict):
        raise _stats_error(metadata, name, "there are none")
    try:
        return Stats.from_plain(entry, (3, 1, 1))
    except ValueError as error:
        raise _stats_error(metadata, name, str(error)) from error


def _stats_error(metadata: Metadata, name: str, message: str) -> ConfigError:
    return folder_error(
        metadata.root,
        f"meta/stats.json: statistics of {name}: {message}.",
        "Use --dataset.stats data to compute them from the frames, or do without: "
        "--policy.image_normalization identity.",
    )
