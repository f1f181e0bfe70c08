"""Videos of one's own: written, described, and read frame by frame whatever their key frames."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from parallel_train.data import video
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.writing import Episode, write_dataset

av = pytest.importorskip("av", reason="needs the extra vision")

TOP, SIDE = "observation.images.top", "observation.images.side"
FILE = f"videos/{TOP}/chunk-000/file-000.mp4"
RNG = np.random.default_rng(0)
FPS, LENGTHS = 20, (30, 1, 44)


def pictures(frames: int, height: int = 32, width: int = 48) -> npt.NDArray[np.uint8]:
    """A square that moves over a background of the episode's own; every frame looks different."""
    shown = np.full((frames, height, width, 3), RNG.integers(60, 200, 3), np.uint8)
    for number, picture in enumerate(shown):
        column = number % (width - 8)
        picture[4:12, column : column + 8] = (250, 4 * (number // 8), 10)
    return shown


def episode(frames: int, *cameras: str) -> Episode:
    state = RNG.normal(size=(frames, 3)).astype(np.float32)
    images = {camera: pictures(frames) for camera in cameras}
    return Episode(state, state[:, :2], "look", images)


def decoded(file: Path) -> npt.NDArray[np.uint8]:
    """All frames in order, by PyAV alone."""
    with av.open(str(file)) as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    return np.stack(frames).transpose(0, 3, 1, 2)


def test_episodes_with_pictures_become_a_dataset(tmp_path: Path) -> None:
    episodes = [episode(frames, TOP, SIDE) for frames in LENGTHS]
    write_dataset(tmp_path, episodes, fps=FPS)
    dataset = LeRobotDataset(tmp_path, cameras=[TOP, SIDE])
    assert dataset.spec.cameras() == {TOP: (32, 48, 3), SIDE: (32, 48, 3)}
    for camera in (TOP, SIDE):
        written = np.concatenate([e.images[camera] for e in episodes]).transpose(0, 3, 1, 2)
        read = dataset.__getitems__(range(len(dataset)))[camera].numpy()
        assert read.shape == written.shape
        assert np.abs(read.astype(float) - written).mean() < 6  # the codec loses a little
        stats, values = dataset.stats[camera], written / 255
        assert stats.mean.shape == (3, 1, 1)
        for found, expected in (
            (stats.mean, values.mean(axis=(0, 2, 3))),
            (stats.std, values.std(axis=(0, 2, 3))),
            (stats.min, values.min(axis=(0, 2, 3))),
            (stats.max, values.max(axis=(0, 2, 3))),
        ):
            np.testing.assert_allclose(found[:, 0, 0], expected, atol=1e-9)
        median = json.loads((tmp_path / "meta/stats.json").read_text())[camera]["q50"]
        np.testing.assert_allclose(
            np.ravel(median), np.median(values, axis=(0, 2, 3)), atol=1 / 255
        )


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(
    ("codec", "key_frame_every"),
    [("libsvtav1", 2), ("libx264", 1), ("libx264", 2), ("libx264", 12), ("mpeg4", 250)],
)
def test_every_frame_is_the_one_at_its_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    key_frame_every: int,
    index: bool,
) -> None:
    """Also where frames are stored in another order than they are shown (libx264)."""
    if codec not in av.codecs_available:
        pytest.skip(f"PyAV {av.__version__} has no {codec}")
    episodes = [episode(frames, TOP) for frames in LENGTHS]
    write_dataset(tmp_path, episodes, fps=FPS, codec=codec, key_frame_every=key_frame_every)
    if not index:  # PyAV before 16 has none
        monkeypatch.setattr(video, "_key_frames_s", lambda stream: None)
    dataset, expected = LeRobotDataset(tmp_path, cameras=[TOP]), decoded(tmp_path / FILE)
    assert len({picture.tobytes() for picture in expected}) == len(dataset) == sum(LENGTHS)
    orders = [
        range(sum(LENGTHS)),  # each batch goes on where the one before ended
        range(sum(LENGTHS))[::-1],
        RNG.permutation(sum(LENGTHS)),
        RNG.integers(0, sum(LENGTHS), 60),
    ]
    for order in orders:
        for start in range(0, len(order), 7):
            samples = [int(sample) for sample in order[start : start + 7]]
            read = dataset.__getitems__(samples)[TOP].numpy()
            assert np.array_equal(read, expected[samples])


def test_a_file_is_passed_through_once_and_not_between_its_key_frames(tmp_path: Path) -> None:
    """Counted in frames that are decoded, which is what reading costs."""

    class Counted:
        count = 0

        def __init__(self, decoder: object) -> None:
            self.decoder = iter(decoder)  # type: ignore[call-overload]

        def __next__(self) -> object:
            frame = next(self.decoder)
            Counted.count += 1
            return frame

    class Opened(video._OpenVideo):
        def _decode_from(self, time_s: float) -> None:
            wanted = int(time_s / self._stream.time_base)
            self.container.seek(wanted, stream=self._stream, backward=True)
            self._decoder, self._frame = Counted(self.container.decode(self._stream)), None
            self._advance()

    write_dataset(tmp_path, [episode(200, TOP)], fps=FPS, codec="mpeg4", key_frame_every=10)
    frames = video.VideoFrames(tmp_path, FPS, 1e-4)
    frames._open[video.os.getpid(), FILE] = Opened(frames._opened(FILE), av)

    def cost(*numbers: int) -> int:
        Counted.count = 0
        frames.read(FILE, np.array(numbers) / FPS)
        return Counted.count

    assert cost(*range(8)) == 8
    assert cost(*range(8, 60)) == 52  # goes on
    assert cost(59, 59) == 0  # is there
    assert cost(130) == 1  # a key frame
    assert cost(133, 185) == 3 + 6  # on from 130, and from the key frame at 180
    assert cost(47, 42) == 8  # back to 40, then in the order of time


def test_pictures_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    odd = Episode(np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32), "look")
    with pytest.raises(ValueError, match=r"episode 1 has cameras \[\], not \['observation.images"):
        write_dataset(tmp_path, [episode(2, TOP), odd], fps=FPS)
    uneven = {TOP: np.zeros((2, 31, 48, 3), np.uint8)}
    with pytest.raises(ValueError, match=r"pictures of 31 x 48 pixels, but both must be even"):
        write_dataset(tmp_path, [Episode(odd.state, odd.action, "look", uneven)], fps=FPS)


def test_a_video_that_ends_early_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, [episode(10, TOP)], fps=FPS, codec="mpeg4", key_frame_every=4)
    frames = video.VideoFrames(tmp_path, FPS, 1e-4)
    with pytest.raises(
        video.ConfigError, match=r"does not have a frame at 0.5000 s .* is at 0.4500 s"
    ):
        frames.read(FILE, np.array([0.1, 0.5]))
    read = torch.from_numpy(frames.read(FILE, np.array([0.45, 0.0])))  # and goes on working
    assert not torch.equal(read[0], read[1])


def test_writing_leaves_the_scheduling_of_the_process_alone(tmp_path: Path) -> None:
    """As root, SVT-AV1 makes the thread that opens it a real-time one."""
    before = os.sched_getscheduler(0)
    write_dataset(tmp_path, [episode(4, TOP)], fps=FPS, codec="libsvtav1")
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert {os.sched_getscheduler(thread) for thread in threads} == {before}
