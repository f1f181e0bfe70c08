"""Frames of a dataset's videos by timestamp, through PyAV (the `vision` extra)."""

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


class VideoFrames:
    """Decodes single frames; keeps the files it used last open.

    Args:
        root: The dataset's folder.
        fps: Frames per second of its videos.
        tolerance_s: How far a frame's time may lie from the time asked for.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(self, root: Path, fps: float, tolerance_s: float) -> None:
        self._av = _import_av()
        self._root, self._fps, self._tolerance_s = root, fps, tolerance_s
        self._open: OrderedDict[tuple[int, str], Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_av": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _av=_import_av())

    def check(self, file: str) -> None:
        """Open `file` once, to see that it is there and is a video.

        Raises:
            ConfigError: it is missing or damaged.
        """
        self._container(file)

    def read(self, file: str, times_s: npt.NDArray[np.float64]) -> Images:
        """RGB frames [times, 3, height, width] at `times_s`, in any order.

        Raises:
            ConfigError: the file has no frame at one of the times.
        """
        order = np.argsort(times_s, kind="stable")
        frames: dict[int, Images] = {}
        position = float("-inf")
        image: Images | None = None
        decoder: Any = None
        for at in order.tolist():
            time_s = float(times_s[at])
            if decoder is None or not self._near(position, time_s):
                # Close ahead, decoding on is cheaper than seeking to a key frame again.
                if decoder is None or time_s - position > 1.0 or time_s < position:
                    decoder, position = self._seek(file, time_s), float("-inf")
                position, image = self._advance(file, decoder, time_s)
            assert image is not None
            frames[at] = image
        return np.stack([frames[at] for at in range(len(times_s))])

    def _near(self, position: float, time_s: float) -> bool:
        return abs(position - time_s) <= self._tolerance_s

    def _seek(self, file: str, time_s: float) -> Any:
        container = self._container(file)
        stream = container.streams.video[0]
        # Half a frame early, or rounding may land on the key frame after the one that is needed.
        start = max(0.0, time_s - 0.5 / self._fps)
        container.seek(int(start / stream.time_base), stream=stream, backward=True)
        return container.decode(stream)

    def _advance(self, file: str, decoder: Any, time_s: float) -> tuple[float, Images]:
        """Decode until the frame at `time_s`; returns its own time and its picture."""
        last = float("nan")
        try:
            for frame in decoder:
                last = float(frame.time)
                if self._near(last, time_s):
                    return last, frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
                if last > time_s:
                    break
        except self._av.FFmpegError as error:
            raise folder_error(self._root, f"{file} cannot be decoded: {error}.") from error
        raise folder_error(
            self._root,
            f"{file} has no frame at {time_s:.4f} s (the nearest that was decoded is at "
            f"{last:.4f} s).",
            "Copy the dataset again, or allow more with --dataset.tolerance_s.",
        )

    def _container(self, file: str) -> Any:
        # A forked loader worker must not share the file position of its parent.
        key = os.getpid(), file
        if key not in self._open:
            self._open[key] = self._opened(file)
            if len(self._open) > _OPEN_FILES:
                (pid, _), oldest = self._open.popitem(last=False)
                if pid == os.getpid():
                    oldest.close()
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
                self._root, f"{file} is no readable video: {error}.", "Copy the dataset again."
            ) from error
        container.streams.video[0].codec_context.thread_count = 1
        return container


def _import_av() -> Any:
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
