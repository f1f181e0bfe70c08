"""Finds frames of a dataset's videos by timestamp, through PyAV (the `vision` extra)."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_config import ConfigError, Problem
from parallel_train.data.metadata import folder_error

Images = npt.NDArray[np.uint8]
_OPEN_FILES = 16
_SEEK_COSTS_FRAMES = 2
"""Going back to a key frame takes about as long as decoding this many frames."""
_UNKNOWN_GAP_S = 1.0
"""Seek over gaps longer than this where nothing is known of the key frames."""


class VideoFrames:
    """Decodes single frames; keeps the files it used last open, each at the frame it read last.

    Args:
        root: The dataset's folder.
        fps: Frames per second of its videos.
        tolerance_s: How far a frame's time may lie from the time asked for.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(self, root: Path, fps: float, tolerance_s: float) -> None:
        self._av = import_av()
        self._root, self._fps, self._tolerance_s = root, fps, tolerance_s
        self._open: OrderedDict[tuple[int, str], _OpenVideo] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        # Open files and modules cannot be pickled; a spawned worker opens its own.
        return {**self.__dict__, "_open": OrderedDict(), "_av": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _av=import_av())

    def check(self, file: str) -> None:
        """Open `file` once, to see that it is there and is a video.

        Raises:
            ConfigError: it is missing or damaged.
        """
        self._video(file)

    def read(self, file: str, times_s: npt.NDArray[np.float64]) -> Images:
        """RGB frames [times, 3, height, width] at `times_s`, in any order.

        They are decoded in the order of time, so that the file is passed through once.

        Raises:
            ConfigError: the file has no frame at one of the times.
        """
        video = self._video(file)
        frames: dict[int, Images] = {}
        try:
            # Decoding goes forward only; each step back is a seek.
            for at in np.argsort(times_s, kind="stable").tolist():
                time_s = float(times_s[at])
                found_s, frames[at] = video.frame_at(time_s, self._fps, self._tolerance_s)
                # "not <=": a file without any frame gives NaN.
                if not abs(found_s - time_s) <= self._tolerance_s:
                    raise self._no_frame(file, time_s, found_s)
        except self._av.FFmpegError as error:
            raise folder_error(self._root, f"{file} cannot be decoded: {error}.") from error
        return np.stack([frames[at] for at in range(len(times_s))])

    def _no_frame(self, file: str, time_s: float, found_s: float) -> ConfigError:
        return folder_error(
            self._root,
            f"{file} does not have a frame at {time_s:.4f} s (the nearest that was decoded is at "
            f"{found_s:.4f} s).",
            "Copy the dataset again, or allow more with --dataset.tolerance_s.",
        )

    def _video(self, file: str) -> _OpenVideo:
        # A forked loader worker must not share the file position of its parent.
        key = os.getpid(), file
        if key not in self._open:
            self._open[key] = _OpenVideo(self._opened(file), self._av)
            if len(self._open) > _OPEN_FILES:
                (pid, _), oldest = self._open.popitem(last=False)
                # An entry of the parent is only forgotten here: the file is the parent's to close.
                if pid == os.getpid():
                    oldest.container.close()
        self._open.move_to_end(key)
        return self._open[key]

    def _opened(self, file: str) -> Any:
        try:
            container = self._av.open(str(self._root / file))
        except FileNotFoundError as error:
            raise folder_error(
                self._root, f"{file} is missing.", "Copy the dataset again."
            ) from error
        except (OSError, self._av.FFmpegError) as error:
            raise folder_error(
                self._root, f"{file} is not a readable video: {error}.", "Copy the dataset again."
            ) from error
        container.streams.video[0].codec_context.thread_count = 1
        return container


class _OpenVideo:
    """One file and how far it was decoded."""

    def __init__(self, container: Any, av: Any) -> None:
        self.container = container
        # One for the whole file: that of a frame would be set up anew for each.
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._stream = container.streams.video[0]
        self._keys_s = _key_frames_s(self._stream)
        self._decoder: Any = None
        self._frame: Any = None

    def frame_at(self, time_s: float, fps: float, tolerance_s: float) -> tuple[float, Images]:
        """The first frame from `time_s` on, or the file's last one: its time and its picture."""
        first_s, last_s = time_s - tolerance_s, time_s + tolerance_s
        if self._frame is None or self._frame.time > last_s or self._is_key_nearer(last_s, fps):
            self._decode_from(last_s)
            if self._frame is not None and self._frame.time > last_s:  # one key frame too far
                # Key frames are listed a little early (see `_key_frames_s`), so that a seek may
                # pass the frame; half a frame back it finds the key frame before.
                self._decode_from(time_s - 0.5 / fps)
        while self._frame is not None and self._frame.time < first_s and self._advance():
            pass
        if self._frame is None:
            return float("nan"), np.empty((3, 0, 0), np.uint8)
        # [height, width, 3] -> [3, height, width], as torch has pictures
        picture = self._reformatter.reformat(self._frame, format="rgb24").to_ndarray()
        return float(self._frame.time), picture.transpose(2, 0, 1)

    def _is_key_nearer(self, time_s: float, fps: float) -> bool:
        """Whether to begin at the last key frame before `time_s` is less work than to go on."""
        if self._keys_s is None:
            return bool(time_s - self._frame.time > _UNKNOWN_GAP_S)
        place = int(np.searchsorted(self._keys_s, time_s, side="right")) - 1
        key_s = self._keys_s[max(place, 0)]
        return bool((key_s - self._frame.time) * fps > _SEEK_COSTS_FRAMES)

    def _decode_from(self, time_s: float) -> None:
        """Go to the last key frame that is not after `time_s`, and decode it."""
        wanted = max(0, int(time_s / self._stream.time_base))
        self.container.seek(wanted, stream=self._stream, backward=True)
        self._decoder, self._frame = self.container.decode(self._stream), None
        self._advance()

    def _advance(self) -> bool:
        """Decode the next frame; at the end the last one stays."""
        following = next(self._decoder, None)
        self._frame = self._frame if following is None else following
        return following is not None


def _key_frames_s(stream: Any) -> npt.NDArray[np.float64] | None:
    """About when key frames come, ascending; None where PyAV (before 16) or the file has no index.

    Frames that are stored in another order than they are shown are listed a little early.
    """
    entries = getattr(stream, "index_entries", None) or ()
    keys = [float(entry.timestamp * stream.time_base) for entry in entries if entry.is_keyframe]
    return np.unique(keys) if keys else None


def import_av() -> Any:
    """PyAV.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            Problem(
                "policy.cameras",
                f": videos are read through PyAV, which cannot be imported ({error}).",
                'Install the extra: pip install "parallel-train[vision]".',
            )
        ) from error
    return av
