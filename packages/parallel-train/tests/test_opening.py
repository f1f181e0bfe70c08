"""Opening a dataset answers what can be known before the first update, and demands no more."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parallel_config import ConfigError
from parallel_train.data.config import EMBEDDED_ROOT, DatasetConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.opening import examine, left_out
from parallel_train.data.spec import DataSpec
from parallel_train.data.writing import Episode, write_dataset
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.reward.configuration import RewardConfig
from parallel_train.policies.wam.configuration import WAMConfig
from parallel_train.run.folder import RunFiles

av = pytest.importorskip("av", reason="needs the extra vision")

DATA = Path(__file__).parent / "data"
VIDEO, STATE = DATA / "lerobot_v3_video", DATA / "lerobot_v3_state"
TOP = "observation.images.top"
FRAMES, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
MP4 = f"videos/{TOP}/chunk-000/file-000.mp4"
FPS, LENGTHS = 30, (9, 1, 12)


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return Path(shutil.copytree(VIDEO, tmp_path / "video"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STATE, tmp_path / "state"))


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each picture's brightness tells the frame that it belongs to."""
    root = tmp_path_factory.mktemp("counted")
    write_dataset(root, [_episode(s, n) for s, n in zip((0, 9, 10), LENGTHS, strict=True)], fps=FPS)
    return root


def _episode(start: int, frames: int) -> Episode:
    grey = ((start + np.arange(frames)) * 10 + 20).astype(np.uint8)
    pictures = np.broadcast_to(grey[:, None, None, None], (frames, 32, 32, 3))
    zeros = np.zeros((frames, 2), np.float32)
    return Episode(zeros, zeros, "count", {TOP: pictures})


def _json(root: Path, name: str, change: Callable[[Any], object]) -> None:
    path = root / "meta" / name
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def _rows(root: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    rows = pq.read_table(root / EPISODES).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows), root / EPISODES)


def _column(root: Path, name: str, array: pa.Array) -> None:
    table = pq.read_table(root / FRAMES)
    at = table.column_names.index(name)
    pq.write_table(table.set_column(at, name, array), root / FRAMES)


def _declare(root: Path, name: str, **entry: object) -> None:
    _json(root, "info.json", lambda info: info["features"].setdefault(name, {}).update(entry))


def _opened(root: Path, config: Any, **changes: Any) -> LeRobotDataset:
    return LeRobotDataset.from_config(DatasetConfig(root=str(root), **changes), config)


def _shown(dataset: LeRobotDataset, rows: list[int]) -> list[int]:
    """Which frame each picture shows."""
    means = dataset.__getitems__(rows)[TOP].double().mean(dim=(1, 2, 3)).numpy()
    return [round((mean - 20) / 10) for mean in means]


def _shifted(root: Path, target: Path, off: Callable[[int], float]) -> Path:
    """A copy whose picture k stands at k / fps + off(k)."""
    shutil.copytree(root, target)
    with av.open(str(root / MP4)) as container:
        pictures = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    with av.open(str(target / MP4), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"g": "2", "bf": "0"})
        stream.width = stream.height = 32
        for k, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.time_base = stream.codec_context.time_base = Fraction(1, 90_000)
            frame.pts = round((k / FPS + off(k)) * 90_000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return target


@pytest.mark.parametrize(
    "off", [lambda k: 0.0, lambda k: 0.012, lambda k: (k % 3) * 0.007], ids=["exact", "late", "odd"]
)
def test_a_picture_is_the_nearest_in_any_order_and_with_any_tolerance(
    counted: Path, tmp_path: Path, off: Callable[[int], float]
) -> None:
    root = _shifted(counted, tmp_path / "shifted", off)
    dataset = LeRobotDataset(root, cameras=[TOP], tolerance_s=0.0166)
    count, rng = sum(LENGTHS), np.random.default_rng(0)
    for order in (
        range(count),
        range(count)[::-1],
        rng.permutation(count),
        rng.integers(0, 22, 40),
    ):
        for row in order:
            assert _shown(dataset, [int(row)]) == [row]


@pytest.mark.parametrize("tolerance_s", [0.5 / FPS, 0.034, 1.0])
def test_a_tolerance_of_half_a_frame_is_refused(counted: Path, tolerance_s: float) -> None:
    with pytest.raises(ConfigError, match=r"tolerance_s = .* at 30 fps .* below 0.01667"):
        LeRobotDataset(counted, cameras=[TOP], tolerance_s=tolerance_s)
    assert len(LeRobotDataset(counted, tolerance_s=0.0166)) == 22


def _short(root: Path, count: int, rate: int = 10, skip: int = -1, **options: str) -> None:
    """Write the video anew with fewer pictures, or at another rate."""
    with av.open(str(root / MP4)) as container:
        pictures = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    with av.open(str(root / MP4), "w", options=options) as container:
        stream = container.add_stream("libx264", rate=rate, options={"g": "2"})
        stream.height, stream.width = pictures[0].shape[:2]
        for k, picture in enumerate(pictures[:count]):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = k, Fraction(1, rate)
            if k != skip:
                container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _cut(root: Path) -> None:
    """As a copy that stopped: the index stands in front, and the last pictures are missing."""
    _short(root, 75, movflags="faststart")
    (root / MP4).write_bytes((root / MP4).read_bytes()[:-300])


def _sized(root: Path) -> None:
    """The third episode in a file of its own, with pictures of another size."""
    other = MP4.replace("file-000", "file-001")
    with av.open(str(root / other), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height, stream.width = 32, 64
        for k in range(30):
            frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), 9, np.uint8), format="rgb24")
            frame.pts, frame.time_base = k, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    at = f"videos/{TOP}"
    _rows(root, lambda rows: rows[2].update({f"{at}/file_index": 1, f"{at}/from_timestamp": 0.0}))


VIDEO_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "three pictures short": (
        lambda root: _short(root, 72),
        r"picture of frame 2\d of episode 2 and of 2 others: .* "
        r"\(the file has 72 pictures, the last at 7.1000 s\). Record the episode again, or leave",
    ),
    "another rate": (
        lambda root: _short(root, 75, 15),
        r"picture of frame \d+ of episode \d.* 15 come per second and not 10\)",
    ),
    "nearly its rate": (
        lambda root: _short(root, 75, 11),
        r"picture of frame 1 of episode 0 .* 11 come per second and not 10\)",
    ),
    "one picture lost": (
        lambda root: _short(root, 75, skip=31),
        r"picture of frame 11 of episode 1: it",
    ),
    "cut by a copy": (_cut, r"file-000.mp4 is cut short: its last 300 bytes are missing"),
    "two sizes": (_sized, r"are 64 x 64 in .*file-000.mp4, but 32 x 64 in .*file-001.mp4"),
    "a sound": (
        lambda root: shutil.copy(_sound(root), root / MP4) and None,
        r"file-000.mp4 does not hold a video",
    ),
}


def _sound(root: Path) -> Path:
    with av.open(str(root / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44_100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.rate = 44_100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return root / "sound.mp4"


@pytest.mark.parametrize("name", VIDEO_FAULTS)
def test_a_video_that_does_not_hold_its_episodes_is_refused_on_opening(
    name: str, video: Path
) -> None:
    damage, message = VIDEO_FAULTS[name]
    damage(video)
    with pytest.raises(ConfigError, match=message) as caught:
        LeRobotDataset(video, cameras=[TOP])
    assert "tolerance" not in str(caught.value)  # it could only make other pictures wrong
    LeRobotDataset(video)  # a camera that is not read is not demanded


def test_an_episode_whose_video_is_short_can_be_left_out(video: Path) -> None:
    _short(video, 72)
    assert len(LeRobotDataset(video, episodes=[0, 1], cameras=[TOP])) == 45


def _scaled(factor: float) -> Callable[[Any], None]:
    def change(stats: Any) -> None:
        for key in ("min", "max", "mean", "std"):
            stats[TOP][key] = (np.array(stats[TOP][key]) * factor).tolist()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_scaled(255), r"they reach from .* to 2\d\d.*, but pictures are scaled to \[0, 1\]"),
        (
            _scaled(1 / 255),
            r"(mean|std) of channel \d is 0.00\d+, but 16 frames of the camera give 0",
        ),
        (lambda s: s[TOP].update(mean=s[TOP]["mean"][::-1]), r"mean of channel \d is"),
        (lambda s: s[TOP].update(std=[[[40.0]]] * 3), r"std of channel 0 is 40, but 16 frames"),
        (lambda s: s[TOP].update(mean=[0.5, 0.5, 0.5]), r"mean has shape \[3\], not \[3, 1, 1\]"),
        (lambda s: s.pop(TOP), r"statistics of observation.images.top: there are none"),
    ],
    ids=["0..255", "divided twice", "BGR", "std", "flat", "none"],
)
def test_statistics_of_a_camera_are_those_of_its_pictures_or_refused(
    video: Path, change: Callable[[Any], None], message: str
) -> None:
    _json(video, "stats.json", change)
    act = ACTConfig(cameras=(TOP,))
    way = r".*Use --dataset.stats data .*--policy.image_normalization identity"
    with pytest.raises(ConfigError, match=message + way):
        _opened(video, act)
    assert (
        TOP not in _opened(video, ACTConfig(cameras=(TOP,), image_normalization="identity")).stats
    )
    computed = _opened(video, act, stats="data").stats[TOP]
    right = LeRobotDataset(VIDEO, cameras=[TOP]).stats[TOP]
    np.testing.assert_allclose(computed.mean, right.mean, atol=0.02)


def _effort(root: Path, values: pa.Array, **entry: object) -> None:
    table = pq.read_table(root / FRAMES).append_column("observation.effort", values)
    pq.write_table(table, root / FRAMES)
    _declare(root, "observation.effort", **{"dtype": "float32", "shape": [1], **entry})


EFFORTS: Mapping[str, Callable[[Path], None]] = {
    "NaN": lambda root: _effort(root, pa.array([float("nan")] * 75, pa.float32())),
    "no statistics": lambda root: _effort(root, pa.array([1.0] * 75, pa.float32())),
    "empty": lambda root: _effort(root, pa.array([None] * 75, pa.float32())),
    "text": lambda root: _effort(root, pa.array(["strong"] * 75)),
    "another width": lambda root: _effort(root, pa.array([[1.0, 2.0]] * 75)),
    "no column": lambda root: _declare(root, "observation.effort", dtype="float32", shape=[1]),
}


@pytest.mark.parametrize("name", EFFORTS)
def test_a_feature_that_the_policy_does_not_read_may_be_damaged(name: str, state: Path) -> None:
    EFFORTS[name](state)
    assert len(_opened(state, WAMConfig())) == 75
    with pytest.raises(ConfigError, match=r"observation.effort"):
        _opened(state, ACTConfig())  # it reads every observation


def test_episodes_that_are_not_chosen_are_not_demanded(state: Path) -> None:
    table = pq.read_table(state / FRAMES)
    pq.write_table(table.filter(pa.compute.less(table["episode_index"], 2)), state / FRAMES)
    _rows(state, lambda rows: rows[2].update({"data/file_index": 1}))
    (state / "data/chunk-000/file-001.parquet").write_text("torn")
    dataset = LeRobotDataset(state, episodes=[1], also=[0])
    whole = LeRobotDataset(STATE)
    assert dataset[0]["action"].equal(whole[dataset.metadata.episodes[1].first]["action"])
    assert dataset.of_episodes([0])[3]["action"].equal(whole[3]["action"])
    with pytest.raises(ValueError, match=r"episodes \[2\] were not read"):
        dataset.of_episodes([2])
    _json(state, "stats.json", lambda s: s["action"].update(max=[0.0, 0.0]))
    with pytest.raises(ConfigError, match=r"action: max\[0\] is 0, but the frames give"):
        LeRobotDataset(state, episodes=[1])


def test_frames_are_found_by_what_files_hold(state: Path) -> None:
    table, whole = pq.read_table(state / FRAMES), LeRobotDataset(STATE)
    third = table.filter(pa.compute.equal(table["episode_index"], 2))
    rest = table.filter(pa.compute.less(table["episode_index"], 2))
    other = state / "data/chunk-000/file-001.parquet"
    # The entry of episode 2 goes on naming the file before its own; rows may be in any order.
    pq.write_table(rest.take(np.random.default_rng(0).permutation(len(rest))), state / FRAMES)
    pq.write_table(third, other)
    dataset = LeRobotDataset(state)
    for name, value in dataset.__getitems__(range(75)).items():
        assert value.equal(whole.__getitems__(range(75))[name]), name
    pq.write_table(third.slice(1), other)
    with pytest.raises(ConfigError, match=r"hold 74 frames of the 75 .* \(of episode 2\).*others"):
        LeRobotDataset(state)
    pq.write_table(pa.concat_tables([rest.slice(0, 1), third]), other)
    with pytest.raises(ConfigError, match=r"frame \d+ is there twice.*file-001.*left over"):
        LeRobotDataset(state)
    _column(state, "index", pa.array([*range(1, len(rest)), 99]))
    with pytest.raises(ConfigError, match=r"has a frame of index 99, but .* has 75 frames"):
        LeRobotDataset(state)


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint16", "float16", "float64", "bool"])
def test_numbers_of_every_kind_are_observations(state: Path, dtype: str) -> None:
    values = np.zeros((75, 4), dtype)
    values[1:, 2] = 1
    array = pa.array(values.tolist(), pa.list_(pa.from_numpy_dtype(np.dtype(dtype))))
    _column(state, "observation.state", array)
    _declare(state, "observation.state", dtype=dtype)
    dataset = _opened(state, ACTConfig(), stats="data")
    assert dataset.spec.observation_vectors() == {"observation.state": 4}
    assert dataset.__getitems__(range(75))["observation.state"].tolist() == values.tolist()
    assert dataset.stats["observation.state"].max.tolist() == [0, 0, 1, 0]


def _two_columns() -> pa.Array:
    return pa.array([[i / 75, -i] for i in range(75)], pa.list_(pa.float64()))


ARROW = {
    "list": _two_columns,
    "large list": lambda: _two_columns().cast(pa.large_list(pa.float32())),
    "half floats": lambda: pa.array(
        [[np.float16(i / 75), np.float16(-i)] for i in range(75)], pa.list_(pa.float16())
    ),
    "list view": lambda: pa.array(_two_columns().to_pylist(), pa.list_view(pa.float32())),
    "decimals": lambda: _two_columns().cast(pa.list_(pa.decimal128(12, 6)), safe=False),
    "a tensor": lambda: pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2]), _two_columns().cast(pa.list_(pa.float32(), 2))
    ),
}


@pytest.mark.parametrize("kind", ARROW)
def test_columns_of_other_writers_are_read(state: Path, kind: str) -> None:
    _column(state, "action", ARROW[kind]())
    found = LeRobotDataset(state, stats="data").__getitems__(range(75))["action"].numpy()
    np.testing.assert_allclose(found, [[i / 75, -i] for i in range(75)], atol=1e-2)


def test_dictionaries_of_numbers_are_read_and_other_columns_named_as_they_are(state: Path) -> None:
    tasks = pq.read_table(state / FRAMES)["task_index"].combine_chunks()
    _column(state, "task_index", tasks.dictionary_encode())
    assert LeRobotDataset(state)[0]["task_index"] == tasks[0].as_py()
    _column(state, "action", pa.array([["a", "b"]] * 75))
    with pytest.raises(
        ConfigError, match=r"action holds values of Arrow type string, but .*float32"
    ):
        LeRobotDataset(state)
    _column(state, "action", pa.array([[1.0, None]] * 75))
    with pytest.raises(ConfigError, match=r"action\[1\] is nan in episode 0, frame 0"):
        LeRobotDataset(state, stats="data")
    _column(state, "task_index", pa.array([0.5] * 75))
    with pytest.raises(ConfigError, match=r"task_index holds 0.5, but .* declares int64"):
        LeRobotDataset(state)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ([3, 64, 64], ["channels", "height", "width"]),
        ([3, 64, 64], ["channel", "height", "width"]),
        ([3, 64, 64], None),
        ([480, 640, 3], ["height", "width", "channels"]),
        ([64, 64, 3], ["height", "width", "rgb"]),
    ],
)
def test_a_camera_has_the_size_of_its_video(video: Path, shape: list[int], names: Any) -> None:
    _declare(video, TOP, shape=shape, names=names)
    assert LeRobotDataset(video, cameras=[TOP]).spec.cameras() == {TOP: (64, 64, 3)}


@pytest.mark.parametrize(
    "entry", [{"info": {"video.is_depth_map": True}}, {"shape": [64, 64, 1]}, {"shape": [64, 64]}]
)
def test_a_depth_map_is_not_a_colour_picture(video: Path, entry: dict[str, Any]) -> None:
    _declare(video, TOP, **entry)
    with pytest.raises(ConfigError, match=r"\[64, 64, 1\]: it is not a colour picture.*depth maps"):
        LeRobotDataset(video, cameras=[TOP])


def _task(root: Path, text: str) -> None:
    table = pa.table({"task_index": [0, 1], "task": [text + " left", text + " right"]})
    pq.write_table(table, root / "meta/tasks.parquet")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a torn data file": (lambda r: (r / FRAMES).write_bytes(b"PAR1"), r"file-000.parquet cannot"),
    "frames of another rate": (
        lambda r: _json(r, "info.json", lambda info: info.update(fps=12)),
        r"frame 1 of episode 0 is at .* but at 12 fps it belongs at",
    ),
    "NaN in the actions": (
        lambda r: _column(r, "action", pa.array([[float("nan"), 0.0]] * 75)),
        r"action\[0\] is nan in episode 0, frame 0 \(75 such frames",
    ),
    "actions in other units": (
        lambda r: _column(r, "action", pa.array([[57.3, 0.1]] * 75)),
        r"meta/stats.json: action: mean\[0\] is .* but the frames give 57.3",
    ),
    "no statistics": (lambda r: (r / "meta/stats.json").unlink(), r"does not have statistics of"),
    "a width of another robot": (
        lambda r: _declare(r, "action", shape=[7]),
        r"'action' is declared with shape \[7\], but .* holds 2 values",
    ),
    "an unknown task": (
        lambda r: _column(r, "task_index", pa.array([5] * 75)),
        r"task_index reaches 5, but meta/tasks.parquet has 2 tasks",
    ),
    "an episode that was never copied": (
        lambda r: pq.write_table(pq.read_table(r / FRAMES).slice(0, 50), r / FRAMES),
        r"hold 50 frames of the 75 that meta/episodes says",
    ),
    "a video that was never copied": (lambda r: (r / MP4).unlink(), r"file-000.mp4 is missing"),
    "a video that ends early": (lambda r: _short(r, 70), r"of episode 2 and of 4 others"),
    "a video that begins elsewhere": (
        lambda r: _rows(r, lambda rows: rows[0].update({f"videos/{TOP}/from_timestamp": 100.0})),
        r"picture of frame 0 of episode 0 and of \d+ others: it belongs at 100.0000 s",
    ),
    "pictures in 0..255": (
        lambda r: _json(r, "stats.json", _scaled(255)),
        r"but pictures are scaled to \[0, 1\]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_of_twelve_faults_is_refused_with_a_remedy(name: str, video: Path) -> None:
    damage, message = FAULTS[name]
    damage(video)
    with pytest.raises(ConfigError, match=message):
        LeRobotDataset(video, cameras=[TOP])
    found = examine(video).problems
    assert any(re.search(message, problem.message) for problem in found), found
    assert all(problem.remedy for problem in found)


def test_the_doctor_finds_all_faults_of_a_dataset_at_once(video: Path) -> None:
    assert examine(VIDEO).problems == ()
    for name in ("NaN in the actions", "a video that ends early", "an unknown feature"):
        FAULTS.get(name, (lambda r: _declare(r, "extra", dtype="int64", shape=[1]), ""))[0](video)
    done = subprocess.run(
        [sys.executable, "-m", "parallel_train", "doctor", "--dataset", str(video)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    for part in (
        "75 frames in 3 episode(s) of 20 to 30 frames, at 10 fps",
        "action[0] is nan",
        "leave these episodes out: --dataset.episodes",
        "does not have the picture of frame 2",
        "does not have the column 'extra'",
        "3 problem(s).",
    ):
        assert part in done.stdout


def test_what_a_policy_is_trained_without_is_one_line(state: Path) -> None:
    EFFORTS["NaN"](state)
    _declare(state, "observation.matrix", dtype="float32", shape=[2, 2])
    _declare(state, "observation.words", dtype="string", shape=[1])
    table = pq.read_table(state / FRAMES)
    matrix = pa.array([[[0.0, 1.0], [1.0, 0.0]]] * 75)
    pq.write_table(table.append_column("observation.matrix", matrix), state / FRAMES)
    wam = WAMConfig()
    (line,) = left_out(_opened(state, wam), wam)
    assert line == (
        "left out of the data: observation.effort (the policy does not read it), "
        "observation.matrix (the policy does not read it), "
        "observation.words (string is not a number)"
    )
    config = ACTConfig()
    assert list(left_out(_opened(VIDEO, config), config)) == [
        f"left out of the data: {TOP} (not in --policy.cameras)"
    ]


def test_tasks_that_a_policy_would_confuse_are_refused() -> None:
    def problems(*tasks: str) -> list[str]:
        return [str(p) for p in WAMConfig(text_bytes=8).data_problems(DataSpec(10, {}, tasks))]

    assert problems("pick red", "pick blue", "pick") == []
    (found,) = problems("pick up red", "pick up blue", "pick up bees")
    assert "'pick up bees' and 'pick up blue' are the same up to there" in found
    assert "--policy.text_bytes 10 or more" in found
    assert problems("", "") == []


def test_names_are_not_repeated() -> None:
    for config in (ACTConfig, WAMConfig, RewardConfig):
        with pytest.raises(ConfigError, match=rf"policy.cameras names '{TOP}' more than once"):
            config(cameras=(TOP, TOP))


def test_a_relative_root_is_saved_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert DatasetConfig(root="ds").rooted().root == str(tmp_path / "ds")
    assert DatasetConfig(root="~/ds").root == str(Path.home() / "ds")
    assert DatasetConfig().rooted() == DatasetConfig()


def test_a_fingerprint_tells_data_apart_that_are_equal_in_size(state: Path, video: Path) -> None:
    before = LeRobotDataset(state).fingerprint
    assert before == LeRobotDataset(STATE).fingerprint  # wherever it lies
    assert before != LeRobotDataset(state, episodes=[0, 1], stats="data").fingerprint
    whole = LeRobotDataset(state)
    assert whole.of_episodes([0]).fingerprint != whole.fingerprint
    actions = pq.read_table(state / FRAMES)["action"].to_pylist()
    _column(
        state, "action", pa.array([actions[1], actions[0], *actions[2:]], pa.list_(pa.float32()))
    )
    assert before != LeRobotDataset(state).fingerprint
    seen = LeRobotDataset(video, cameras=[TOP]).fingerprint
    _short(video, 75)
    assert seen != LeRobotDataset(video, cameras=[TOP]).fingerprint


def test_a_run_does_not_lie_in_its_dataset(state: Path) -> None:
    for folder in (state, state / "runs/1"):
        with pytest.raises(ConfigError, match=r"output_dir = .* lies in the dataset"):
            RunFiles(folder).create(state)
    RunFiles(state.parent / "run").create(state)


def test_tasks_are_written_where_lerobot_looks_for_their_text(counted: Path) -> None:
    """It reads a pandas data frame, whose index are the texts."""
    schema = pq.read_schema(counted / "meta/tasks.parquet")
    assert schema.pandas_metadata["index_columns"] == ["task"]
    embedded = pq.read_schema(EMBEDDED_ROOT / "meta/tasks.parquet")
    assert embedded.pandas_metadata == schema.pandas_metadata


def test_each_episode_has_its_statistics_for_tools_that_cut_a_dataset(counted: Path) -> None:
    rows = pq.read_table(counted / EPISODES).to_pylist()
    assert [row["stats/action/count"] for row in rows] == [[n] for n in LENGTHS]
    last = np.array(rows[2][f"stats/{TOP}/mean"])
    assert last.shape == (3, 1, 1)
    np.testing.assert_allclose(last, np.mean((10 + np.arange(12)) * 10 + 20) / 255)
