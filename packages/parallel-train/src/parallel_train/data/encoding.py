"""Writes a camera's pictures as a video that is read frame by frame, through PyAV."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_train.data.video import import_av

Pictures = npt.NDArray[np.uint8]
"""RGB, shape [frames, height, width, 3]."""
CODEC = "libx264"
KEY_FRAME_EVERY = 2
"""As LeRobot records: half of the frames can be read without another one, at the cost of size."""
_QUANTILES = (1, 10, 50, 90, 99)


def write_video(
    path: Path,
    pictures: Iterable[Pictures],
    *,
    fps: int,
    codec: str = CODEC,
    key_frame_every: int = KEY_FRAME_EVERY,
) -> None:
    """Write the pictures of episode after episode into one mp4 file.

    Raises:
        ConfigError: PyAV is not installed.
        ValueError: height or width is odd, which 4:2:0 colours do not allow.
    """
    av = import_av()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _usual_priority(), av.open(str(path), "w") as container:
        stream: Any = None
        for number, picture in enumerate(p for part in pictures for p in part):
            if stream is None:
                options = {"g": str(key_frame_every)}
                stream = container.add_stream(codec, rate=fps, options=options)
                stream.height, stream.width = _even(picture.shape[:2])
                # The format that players commonly read; it keeps colours at half the height and
                # width.
                stream.pix_fmt = "yuv420p"
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            # Frame k at k / fps exactly, as the reader expects.
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        if stream is not None:
            # The encoder holds frames back until it is flushed.
            container.mux(stream.encode())


def picture_stats(pictures: Sequence[Pictures]) -> dict[str, Any]:
    """The entry of `meta/stats.json`: per channel, of values in [0, 1], as [3][1][1]."""
    # A histogram per channel says everything about bytes, in a few kilobytes for any number of
    # frames.
    counts = np.zeros((3, 256), np.int64)
    for part in pictures:
        for channel in range(3):
            counts[channel] += np.bincount(part[..., channel].reshape(-1), minlength=256)
    values = np.arange(256) / 255
    number = counts.sum(axis=1)
    mean = counts @ values / number
    variance = counts @ values**2 / number - mean**2
    found = {
        "min": [values[row.nonzero()[0][0]] for row in counts],
        "max": [values[row.nonzero()[0][-1]] for row in counts],
        "mean": mean.tolist(),
        # Rounding may take the variance of a constant channel below 0.
        "std": np.sqrt(variance.clip(min=0)).tolist(),
    }
    for quantile in _QUANTILES:
        places = [np.searchsorted(row.cumsum(), quantile / 100 * row.sum()) for row in counts]
        found[f"q{quantile:02d}"] = [values[place] for place in places]
    shaped = {name: [[[float(v)]] for v in per_channel] for name, per_channel in found.items()}
    return {**shaped, "count": [sum(len(part) for part in pictures)]}


@contextlib.contextmanager
def _usual_priority() -> Iterator[None]:
    """Give this thread its scheduling back: as root, SVT-AV1 raises it above all other processes.

    All that such a process starts inherits it, and two busy ranks then hold up the whole machine.
    """
    if not hasattr(os, "sched_getscheduler"):  # Linux has it, macOS does not
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def _even(size: tuple[int, ...]) -> tuple[int, ...]:
    if any(n % 2 for n in size):
        raise ValueError(
            f"pictures of {size[0]} x {size[1]} pixels, but both must be even in a video"
        )
    return size
