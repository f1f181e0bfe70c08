"""Dataset folders: LeRobot's own are read to the last number, damaged ones are refused at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from parallel_config import ConfigError
from parallel_train.data.config import EMBEDDED_ROOT
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.spec import DataSpec
from parallel_train.data.writing import Episode, write_dataset

DATA = Path(__file__).parent / "data"
STATE = DATA / "lerobot_v3_state"
CHUNK = {"action": [i / 10 for i in range(4)]}
FRAMES = "data/chunk-000/file-000.parquet"


def test_every_number_that_lerobot_wrote_is_read() -> None:
    dataset = LeRobotDataset(STATE)
    table = pq.read_table(STATE / FRAMES)
    assert len(dataset) == dataset.num_frames == table.num_rows == 75
    assert dataset.fps == 10
    assert dataset.tasks == ("go to the origin", "stay")
    for row, expected in enumerate(table.to_pylist()):
        sample = dataset[row]
        for name, value in expected.items():
            assert sample[name].tolist() == value, (row, name)


def test_chunks_stop_at_the_end_of_their_episode() -> None:
    dataset = LeRobotDataset(STATE, CHUNK)
    actions = np.array(pq.read_table(STATE / FRAMES)["action"].to_pylist(), np.float32)
    last = dataset.metadata.episodes[0].end - 1
    sample = dataset[last - 1]
    assert sample["action"].shape == (4, 2)
    assert sample["action_is_pad"].tolist() == [False, False, True, True]
    wanted = actions[[last - 1, last, last, last]]
    assert np.array_equal(sample["action"].numpy(), wanted)
    assert int(sample["episode_index"]) == 0


def test_past_observations_stop_at_the_start_of_their_episode() -> None:
    dataset = LeRobotDataset(STATE, {"observation.state": [-0.2, -0.1, 0.0]})
    first = dataset.metadata.episodes[1].first
    sample = dataset[first + 1]
    assert sample["observation.state_is_pad"].tolist() == [True, False, False]
    plain = LeRobotDataset(STATE)
    assert torch.equal(sample["observation.state"][1], plain[first]["observation.state"])
    assert torch.equal(sample["observation.state"][0], plain[first]["observation.state"])


def test_a_batch_is_its_samples_stacked() -> None:
    dataset = LeRobotDataset(STATE, CHUNK)
    batch = dataset.__getitems__([70, 3, 41])
    for row, sample in enumerate((70, 3, 41)):
        for name, value in dataset[sample].items():
            assert torch.equal(batch[name][row], value)


def test_statistics_of_the_file_agree_with_a_direct_computation() -> None:
    from_file = LeRobotDataset(STATE).stats
    computed = LeRobotDataset(STATE, stats="data").stats
    assert set(from_file) == {"observation.state", "action"}
    for name in computed:
        for key in ("mean", "std", "min", "max"):
            file, direct = getattr(from_file[name], key), getattr(computed[name], key)
            np.testing.assert_allclose(file, direct, rtol=1e-5, atol=1e-6)


def test_chosen_episodes_are_the_samples_and_the_source_of_data_statistics() -> None:
    dataset = LeRobotDataset(STATE, CHUNK, episodes=[2, 0], stats="data")
    assert set(dataset.__getitems__(range(len(dataset)))["episode_index"].tolist()) == {0, 2}
    whole = LeRobotDataset(STATE, stats="data")
    assert len(dataset) < len(whole)
    assert not np.array_equal(dataset.stats["action"].mean, whole.stats["action"].mean)
    with pytest.raises(ConfigError, match=r"dataset.episodes names \[7\].*3 episodes, 0 to 2"):
        LeRobotDataset(STATE, episodes=[0, 7])


def test_spec_survives_json() -> None:
    spec = LeRobotDataset(STATE).spec
    assert spec.dim("action") == 2
    assert spec.observation_vectors() == {"observation.state": 4}
    assert DataSpec.from_plain(json.loads(json.dumps(spec.to_plain()))) == spec
    with pytest.raises(ConfigError, match=r"feature 'observation.images.top' is missing"):
        spec.dim("observation.images.top")


def test_deltas_that_fall_between_frames_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0.15 s falls between two frames at 10 fps.*1/10 s"):
        LeRobotDataset(STATE, {"action": [0.0, 0.15]})
    assert len(LeRobotDataset(STATE, {"action": [0.0, 0.10004]})) == 75
    with pytest.raises(ConfigError, match=r"the feature 'actions' is missing.*It has: action,"):
        LeRobotDataset(STATE, {"actions": [0.0]})


def _info(**changes: object) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / "meta/info.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def _feature(name: str, shape: list[int]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / "meta/info.json"
        info = json.loads(path.read_text())
        info["features"][name]["shape"] = shape
        path.write_text(json.dumps(info))

    return damage


def _delete(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_text(text) and None


def _cell(column: str, row: int, value: object) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        table = pq.read_table(root / FRAMES)
        values = table[column].to_pylist()
        values[row] = value
        kind = table.schema.field(column).type
        if value is None:  # pyarrow 18 cannot write one in a list of fixed size
            kind = pa.list_(kind.value_type)
        array = pa.array(values, kind)
        table = table.set_column(table.column_names.index(column), column, array)
        pq.write_table(table, root / FRAMES)

    return damage


def _drop_frames(root: Path) -> None:
    pq.write_table(pq.read_table(root / FRAMES).slice(0, 70), root / FRAMES)


def _empty_episode(root: Path) -> None:
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[1] = {**rows[1], "dataset_to_index": rows[1]["dataset_from_index"], "length": 0}
    pq.write_table(pa.Table.from_pylist(rows), path)


def _no_episodes(root: Path) -> None:
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)


def _stats(name: str, key: str, value: object) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / "meta/stats.json"
        stats = json.loads(path.read_text())
        stats[name][key] = value
        path.write_text(json.dumps(stats))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no info": (_delete("meta/info.json"), r"meta/info.json is missing.*check the path"),
    "half an info": (_write("meta/info.json", '{"fps": 10,'), r"meta/info.json is not valid JSON"),
    "version 2.1": (
        _info(codebase_version="v2.1"),
        r"its format is 'v2.1'.*convert_dataset_v21_to_v30",
    ),
    "version 4": (_info(codebase_version="v4.0"), r"its format is 'v4.0', but v3.0 is read"),
    "fps 0": (_info(fps=0), r"fps = 0, but it must be a positive number"),
    "wrong fps": (_info(fps=20), r"frame 1 of episode 0 is at 0.1\d* s, but at 20 fps.*0.05"),
    "no frames file": (_delete(FRAMES), r"data/chunk-000/file-000.parquet is missing"),
    "no tasks": (_delete("meta/tasks.parquet"), r"meta/tasks.parquet is missing"),
    "no episodes folder": (_delete("meta/episodes"), r"meta/episodes does not hold a parquet file"),
    "torn parquet": (_write(FRAMES, "PAR1 torn"), r"file-000.parquet cannot be read"),
    "half the frames": (_drop_frames, r"hold 70 frames of the 75 .* frame 70 \(of episode 2\)"),
    "wrong width": (_feature("action", [3]), r"'action' is declared with shape \[3\].*holds 2 val"),
    "no episodes": (_no_episodes, r"it does not have any episodes"),
    "empty episode": (_empty_episode, r"episodes \[1\] do not have any frames"),
    "NaN action": (
        _cell("action", 40, [0.5, float("nan")]),
        r"action\[1\] is nan in episode 1, frame \d+ \(1 such frames, in episodes \[1\]\)",
    ),
    "infinite state": (
        _cell("observation.state", 3, [float("inf"), 0.0, 0.0, 0.0]),
        r"observation.state\[0\] is inf in episode 0, frame 3",
    ),
    "null action": (_cell("action", 5, None), r"action is empty in 1 frames"),
    "wrong numbering": (_cell("index", 5, 6), r"frame 6 is there twice.* in data/chunk-000"),
    "unknown task": (_cell("task_index", 9, 2), r"task_index reaches 2.* has 2 tasks"),
    "no statistics": (
        _delete("meta/stats.json"),
        r"does not have statistics of .*--dataset.stats data",
    ),
    "other statistics": (
        _stats("action", "mean", [0.5, 0.0]),
        r"action: mean\[0\] is 0.5, but the frames give .*--dataset.stats data",
    ),
    "statistics of another width": (
        _stats("action", "std", [1.0]),
        r"action: std has shape \[1\], not \[2\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_clear_error(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    root = tmp_path / "dataset"
    shutil.copytree(STATE, root)
    damage(root)
    with pytest.raises(ConfigError, match=message) as caught:
        LeRobotDataset(root, CHUNK)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].path == "dataset.root"


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this folder does not exist. Use --dataset.root"):
        LeRobotDataset(tmp_path / "nowhere")


def test_bad_frames_can_be_left_out(tmp_path: Path) -> None:
    root = tmp_path / "dataset"
    shutil.copytree(STATE, root)
    _cell("action", 40, [0.5, float("nan")])(root)
    dataset = LeRobotDataset(root, CHUNK, episodes=[0, 2], stats="data")
    assert torch.isfinite(dataset.__getitems__(range(len(dataset)))["action"]).all()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    episodes = [
        Episode(
            generator.normal(size=(length, 5)).astype(np.float32),
            generator.normal(size=(length, 3)).astype(np.float32),
            task,
        )
        for length, task in ((4, "a"), (7, "b"), (3, "a"))
    ]
    for folder in ("one", "two"):
        write_dataset(tmp_path / folder, episodes, fps=30)
    one = {p.relative_to(tmp_path / "one"): p.read_bytes() for p in tmp_path.glob("one/**/*.*")}
    two = {p.relative_to(tmp_path / "two"): p.read_bytes() for p in tmp_path.glob("two/**/*.*")}
    assert one == two
    dataset = LeRobotDataset(tmp_path / "one")
    batch = dataset.__getitems__(range(14))
    assert np.array_equal(batch["action"].numpy(), np.concatenate([e.action for e in episodes]))
    assert batch["task_index"].tolist() == [0] * 4 + [1] * 7 + [0] * 3
    assert dataset.tasks == ("a", "b")


def test_the_embedded_dataset_is_small_whole_and_says_where_it_comes_from() -> None:
    dataset = LeRobotDataset(EMBEDDED_ROOT, {"action": [i / 80 for i in range(16)]})
    assert len(dataset.metadata.episodes) == 80
    assert len(dataset.tasks) == 4
    assert dataset.spec.dim("observation.state") == 39
    assert dataset.spec.dim("action") == 4
    size = sum(path.stat().st_size for path in EMBEDDED_ROOT.rglob("*") if path.is_file())
    assert size < 1_000_000
    readme = (EMBEDDED_ROOT / "README.md").read_text()
    assert "MIT" in readme
    assert "record_metaworld.py" in readme
