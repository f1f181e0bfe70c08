"""Pictures inside of the parquet files: read as they were written, whatever the row groups."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parallel_config import ConfigError
from parallel_testing.programs import run_ptrain
from parallel_train.data import embedded
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.opening import examine
from parallel_train.data.order import GlobalBatchSampler
from parallel_train.data.writing import Episode, write_dataset

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("av")
# Python 3.12 warns about the fork that starts a loader worker.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

TOP = "observation.images.top"
LENGTHS = (7, 5)
DATA = "data/chunk-000/file-000.parquet"
Pictures = npt.NDArray[np.uint8]


def encoded(picture: Pictures, kind: str = "PNG", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(file, kind)
    return file.getvalue()


def rewrite(root: Path, change: Callable[[list[Any]], pa.Array], group: int = 5) -> None:
    """Give the data file the column that `change` makes of its pictures."""
    table = pq.read_table(root / DATA)
    column = change(table[TOP].to_pylist())
    at = table.column_names.index(TOP)
    pq.write_table(table.set_column(at, TOP, column), root / DATA, row_group_size=group)


def as_structs(files: Sequence[bytes | None]) -> pa.Array:
    """As LeRobot writes them."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.array([{"bytes": data, "path": "frame.png"} for data in files], kind)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pictures]:
    """A dataset whose camera is moved out of the video, and its pictures [12, 32, 48, 3]."""
    generator = np.random.default_rng(1)
    pictures = [generator.integers(0, 255, (n, 32, 48, 3), np.uint8) for n in LENGTHS]
    state = generator.normal(size=(12, 3)).astype(np.float32)
    parts = [(state[:7], pictures[0]), (state[7:], pictures[1])]
    root = tmp_path_factory.mktemp("data") / "set"
    write_dataset(
        root, [Episode(s, s[:, :2], "look", {TOP: images}) for s, images in parts], fps=10
    )
    shutil.rmtree(root / "videos")
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][TOP]["dtype"] = "image"
    (root / "meta/info.json").write_text(json.dumps(info))
    table = pq.read_table(root / DATA)
    every = np.concatenate(pictures)
    column = as_structs([encoded(picture) for picture in every])
    pq.write_table(table.append_column(TOP, column), root / DATA, row_group_size=5)
    return root, every


@pytest.fixture
def root(written: tuple[Path, Pictures], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written[0], tmp_path / "set"))


def test_pictures_come_as_they_were_written(written: tuple[Path, Pictures]) -> None:
    root, every = written
    dataset = LeRobotDataset(root, {TOP: [-0.1, 0.0]}, cameras=[TOP])
    assert dataset.spec.cameras() == {TOP: (32, 48, 3)}
    batch = dataset.__getitems__([11, 0, 7, 3])
    shown = every.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(batch[TOP][:, 1].numpy(), shown[[11, 0, 7, 3]])
    # The frame before, or the first of the episode.
    np.testing.assert_array_equal(batch[TOP][:, 0].numpy(), shown[[10, 0, 7, 2]])
    values = shown / 255
    found = LeRobotDataset(root, cameras=[TOP], stats="data").stats[TOP]
    np.testing.assert_allclose(found.mean[:, 0, 0], values.mean(axis=(0, 2, 3)), atol=1e-9)


@pytest.mark.parametrize("kept", [embedded.KEPT_BYTES, 0])
def test_workers_read_the_same_pictures_whatever_is_kept(
    written: tuple[Path, Pictures], monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(embedded, "KEPT_BYTES", kept)
    dataset = LeRobotDataset(written[0], cameras=[TOP])
    sampler = GlobalBatchSampler(len(dataset), 4, seed=3)
    with_workers = iter(build_loader(dataset, sampler, num_workers=2))
    here = iter(build_loader(pickle.loads(pickle.dumps(dataset)), sampler))
    for _ in range(6):
        np.testing.assert_array_equal(next(with_workers)[TOP], next(here)[TOP])


def test_only_chosen_episodes_need_their_pictures(root: Path) -> None:
    rewrite(
        root, lambda rows: as_structs([r["bytes"] if n < 7 else b"" for n, r in enumerate(rows)])
    )
    dataset = LeRobotDataset(root, cameras=[TOP], episodes=[0], stats="data")
    assert dataset[6][TOP].shape == (3, 32, 48)
    with pytest.raises(ConfigError, match=r"frame 10 \(of episode 1, in data/.* cannot be decoded"):
        LeRobotDataset(root, cameras=[TOP])


def test_the_fingerprint_knows_the_pictures(root: Path) -> None:
    before = LeRobotDataset(root, cameras=[TOP]).fingerprint
    assert LeRobotDataset(root, cameras=[TOP]).fingerprint == before
    rewrite(root, lambda rows: as_structs([rows[0]["bytes"]] * len(rows)))
    assert LeRobotDataset(root, cameras=[TOP], stats="data").fingerprint != before


def test_plain_bytes_and_jpeg_are_read(root: Path, written: tuple[Path, Pictures]) -> None:
    smooth = np.tile(np.linspace(0, 250, 48).astype(np.uint8)[None, :, None], (32, 1, 3))
    rewrite(root, lambda rows: pa.array([encoded(smooth, "JPEG")] * len(rows), pa.binary()))
    picture = LeRobotDataset(root, cameras=[TOP], stats="data")[3][TOP].numpy()
    assert np.abs(picture.transpose(1, 2, 0).astype(int) - smooth).mean() < 2


SMALL = np.full((30, 48, 3), 9, np.uint8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b"not a picture", "frame 5 (of episode 0, in data/chunk-000/file-000.parquet) cannot be"),
        (None, "is empty, or a path in place of the bytes of a picture"),
        (encoded(SMALL), "are 32 x 48 in frame 0 (of episode 0"),
        (
            encoded(SMALL, mode="L"),
            "has mode 'L': it is not a colour picture of 3 channels of 8 bit",
        ),
        (encoded(SMALL, mode="RGBA"), "has mode 'RGBA'"),
        (encoded(SMALL, mode="I;16"), "has mode 'I;16'"),
    ],
)
def test_what_is_not_such_a_picture_is_refused_when_the_dataset_is_opened(
    root: Path, wrong: bytes | None, message: str
) -> None:
    rewrite(root, lambda rows: as_structs([r["bytes"] for r in rows[:5]] + [wrong] * 7))
    with pytest.raises(ConfigError) as caught:
        LeRobotDataset(root, cameras=[TOP], stats="data")
    assert message in str(caught.value)
    assert TOP in str(caught.value)
    assert any(message in str(problem.message) for problem in examine(root).problems)


def test_a_picture_that_is_cut_short_is_named_when_it_is_read(root: Path) -> None:
    def cut(rows: list[Any]) -> pa.Array:
        return as_structs([r["bytes"][: -900 if n == 4 else None] for n, r in enumerate(rows)])

    rewrite(root, cut, group=12)
    dataset = LeRobotDataset(root, cameras=[TOP], is_normalized=lambda name: False)
    with pytest.raises(ConfigError, match=r"frame 4 \(of episode 0.* cannot be decoded"):
        dataset[4]


def test_a_missing_column_is_named(root: Path) -> None:
    pq.write_table(pq.read_table(root / DATA).drop_columns([TOP]), root / DATA)
    with pytest.raises(ConfigError, match=rf"does not have the column '{TOP}' that meta/info"):
        LeRobotDataset(root, cameras=[TOP])
    LeRobotDataset(root)  # a policy without cameras does not need it


def test_a_policy_trains_on_them(root: Path, tmp_path: Path) -> None:
    said = run_ptrain("doctor", "--dataset", root, cwd=tmp_path)
    assert "pictures of 32 x 48" in said
    run_ptrain(
        "train", "--dataset.root", root, "--policy.cameras", TOP, "--policy.dim_model", 32,
        "--policy.dim_feedforward", 16, "--policy.vision_weights", "None", "--steps", 2,
        "--policy.chunk_size", 4, "--batch_size", 4, "--output_dir", "run", cwd=tmp_path,
    )  # fmt: skip
