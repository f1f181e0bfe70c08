"""Finds frames of a dataset's videos by timestamp, through PyAV (the `vision` extra).

The frame is always the nearest one to the time that was asked for, whatever was read before it.
The tolerance only decides whether that frame is accepted.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel_config import ConfigError, Problem
from parallel_train.data.metadata import COPY, folder_error

Images = npt.NDArray[np.uint8]
RECORD_AGAIN = "Record the episode again, or leave it out: --dataset.episodes with the others."
_OPEN_FILES = 16
_SEEK_COSTS_FRAMES = 2
"""Going back to a key frame takes about as long as decoding this many frames."""
_CLOSE = 0.1
"""Frames: nothing is nearer to a time than a frame within this distance. The rates of videos are
checked, so that two of their frames do not lie that close together."""
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

    def check(self, file: str, spans: Sequence[Span]) -> tuple[int, int]:
        """Height and width of `file`, after its index was compared with what is to be read of it.

        Raises:
            ConfigError: it is missing, damaged or cut short, or lacks a frame of an episode.
        """
        video = self._video(file)
        cut = video.missing_bytes(self._root / file)
        if cut:
            raise folder_error(
                self._root, f"{file} is cut short: its last {cut:,} bytes are missing.", COPY
            )
        times_s = video.times_s
        if times_s is not None and self._missed(times_s, spans)[0] is not None:
            # The index has times of decoding. Those of showing take a pass over the whole file.
            times_s = self._shown(file, video)
        if times_s is None:  # neither an index nor a header: the last frame tells of the length
            last = max(spans, key=lambda span: span.from_s + span.frames)
            self.read(file, np.array([last.from_s + (last.frames - 1) / self._fps]))
            return video.size
        missed, worst_s = self._missed(times_s, spans)
        if missed is not None:
            raise self._lacks(file, times_s, missed, worst_s)
        return video.size

    def _missed(
        self, times_s: npt.NDArray[np.float64], spans: Sequence[Span]
    ) -> tuple[_Missed | None, float]:
        """The first episode that lacks pictures, and how far the worst one of all is off."""
        first, worst_s = None, 0.0
        for span in spans:
            wanted = span.from_s + np.arange(span.frames) / self._fps
            off_s = _distance(times_s, wanted)
            far = np.flatnonzero(~(off_s <= self._tolerance_s))
            if far.size:
                first = first or _Missed(span.episode, int(far[0]), far.size, float(wanted[far[0]]))
                worst_s = max(worst_s, float(off_s.max()))
        return first, worst_s

    def _shown(self, file: str, video: _OpenVideo) -> npt.NDArray[np.float64]:
        try:
            return video.shown_s()
        except self._av.FFmpegError as error:
            raise self._undecodable(file, error) from error

    def _lacks(
        self, file: str, times_s: npt.NDArray[np.float64], missed: _Missed, worst_s: float
    ) -> ConfigError:
        nearest_s = times_s[np.abs(times_s - missed.time_s).argmin()] if times_s.size else np.nan
        more = f" and of {missed.frames - 1} others" if missed.frames > 1 else ""
        way = RECORD_AGAIN
        # Below half a frame the nearest picture is the right one: this cannot make others wrong.
        if worst_s < 0.45 / self._fps:
            way += f" Or accept the nearest picture with --dataset.tolerance_s {1.1 * worst_s:.2g}."
        return folder_error(
            self._root,
            f"{file} does not have the picture of frame {missed.frame} of episode {missed.episode}"
            f"{more}: it belongs at {missed.time_s:.4f} s, the nearest is at {nearest_s:.4f} s"
            f"{_described(times_s, self._fps)}.",
            way,
        )

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
                found_s, frames[at] = video.frame_at(time_s, self._fps)
                # "not <=": a file without any frame gives NaN.
                if not abs(found_s - time_s) <= self._tolerance_s:
                    raise self._no_frame(file, time_s, found_s)
        except self._av.FFmpegError as error:
            raise self._undecodable(file, error) from error
        return np.stack([frames[at] for at in range(len(times_s))])

    def _no_frame(self, file: str, time_s: float, found_s: float) -> ConfigError:
        return folder_error(
            self._root,
            f"{file} does not have a frame at {time_s:.4f} s (the nearest that was decoded is at "
            f"{found_s:.4f} s).",
            RECORD_AGAIN,
        )

    def _undecodable(self, file: str, error: Exception) -> ConfigError:
        return folder_error(
            self._root,
            f"{file} cannot be decoded: {error}.",
            "Copy the file again. If it stays so, leave its episodes out with --dataset.episodes.",
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
            raise folder_error(self._root, f"{file} is missing.", COPY) from error
        except (OSError, self._av.FFmpegError) as error:
            raise folder_error(
                self._root, f"{file} is not a readable video: {error}.", COPY
            ) from error
        if not container.streams.video:
            raise folder_error(self._root, f"{file} does not hold a video.", COPY)
        container.streams.video[0].codec_context.thread_count = 1
        return container


class Span(NamedTuple):
    """The frames of one episode in a file."""

    episode: int
    from_s: float
    """Time of the first one in the file."""
    frames: int


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
        self._ahead: Any = None
        """A frame that was decoded to compare it with the one before."""
        self.size = int(self._stream.height), int(self._stream.width)

    @functools.cached_property
    def times_s(self) -> npt.NDArray[np.float64] | None:
        """About when frames come, ascending; None where neither an index nor a header tells."""
        entries = _entries(self._stream)
        # A stream without a start time begins at 0.
        start_s = float((self._stream.start_time or 0) * self._stream.time_base)
        if entries:
            times = np.sort([entry.timestamp for entry in entries if not entry.is_discard])
            seconds: npt.NDArray[np.float64] = (times - times[0]) * float(self._stream.time_base)
            return start_s + seconds
        if self._stream.frames and self._stream.average_rate:
            return start_s + np.arange(self._stream.frames) / float(self._stream.average_rate)
        return None

    def missing_bytes(self, path: Path) -> int:
        """How far the index reaches beyond the end of the file."""
        ends = [entry.pos + entry.size for entry in _entries(self._stream)]
        return max(0, max(ends, default=0) - path.stat().st_size)

    def shown_s(self) -> npt.NDArray[np.float64]:
        """When frames are shown, ascending, from a pass over the packets of the file."""
        self.container.seek(0, stream=self._stream)
        self._frame = self._ahead = None
        packets = self.container.demux(self._stream)
        shown = [float(p.pts * p.time_base) for p in packets if p.pts is not None]
        return np.sort(np.array(shown, np.float64))

    def frame_at(self, time_s: float, fps: float) -> tuple[float, Images]:
        """The frame nearest to `time_s`: its time and its picture."""
        close_s = _CLOSE / fps
        if (
            self._frame is None
            or self._frame.time > time_s + close_s
            or self._is_key_nearer(time_s + close_s, fps)
        ):
            # Key frames are listed a little early (see `_key_frames_s`), so that a seek may pass
            # the frame; further back it finds a key frame before it.
            for back in (-_CLOSE, 0.5, 4.0, 32.0):
                self._decode_from(time_s - back / fps)
                if self._frame is None or self._frame.time <= time_s + close_s:
                    break
        while self._frame is not None and self._frame.time < time_s - close_s:
            if not self._advance_towards(time_s):
                break
        if self._frame is None:
            return float("nan"), np.empty((3, 0, 0), np.uint8)
        # [height, width, 3] -> [3, height, width], as torch has pictures
        picture = self._reformatter.reformat(self._frame, format="rgb24").to_ndarray()
        return float(self._frame.time), picture.transpose(2, 0, 1)

    def _advance_towards(self, time_s: float) -> bool:
        """Go on by one frame if that is nearer to `time_s`; else keep it for the next time."""
        before = self._frame
        if not self._advance():
            return False
        if abs(self._frame.time - time_s) < abs(before.time - time_s):
            return True
        self._ahead, self._frame = self._frame, before
        return False

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
        self._ahead = None
        self._advance()

    def _advance(self) -> bool:
        """Decode the next frame; at the end the last one stays."""
        following, self._ahead = self._ahead, None
        if following is None:
            following = next(self._decoder, None)
        self._frame = self._frame if following is None else following
        return following is not None


class _Missed(NamedTuple):
    """Pictures that an episode lacks."""

    episode: int
    frame: int
    """The first of them."""
    frames: int
    time_s: float
    """Where it belongs in the file."""


def _described(times_s: npt.NDArray[np.float64], fps: float) -> str:
    """Length of a file, and its rate where that differs from the dataset's, for a message."""
    if len(times_s) < 2:
        return ""
    rate = (len(times_s) - 1) / (times_s[-1] - times_s[0])
    text = f" (the file has {len(times_s)} pictures, the last at {times_s[-1]:.4f} s"
    is_other = abs(rate / fps - 1) > 0.05
    return text + (f"; {rate:.4g} come per second and not {fps:g})" if is_other else ")")


def _distance(
    times_s: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """How far each wanted time lies from the nearest of `times_s`, which ascend."""
    if not times_s.size:
        return np.full(wanted.shape, np.inf)
    right = np.searchsorted(times_s, wanted).clip(1, max(1, len(times_s) - 1))
    nearest: npt.NDArray[np.float64] = np.minimum(
        np.abs(times_s[np.minimum(right, len(times_s) - 1)] - wanted),
        np.abs(times_s[right - 1] - wanted),
    )
    return nearest


def _entries(stream: Any) -> Sequence[Any]:
    return getattr(stream, "index_entries", None) or ()


def _key_frames_s(stream: Any) -> npt.NDArray[np.float64] | None:
    """About when key frames come, ascending; None where PyAV (before 16) or the file has no index.

    Frames that are stored in another order than they are shown are listed a little early.
    """
    entries = _entries(stream)
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
