"""Videos: every frame is the right one, over several files and cameras; ACT sees with them."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from parallel_config import ConfigError
from parallel_train.data.config import DatasetConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler
from parallel_train.data.writing import Episode, write_dataset
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.act.modeling import ACTPolicy
from parallel_train.policies.processors import Preprocessor

av = pytest.importorskip("av", reason="needs the extra vision")
pytest.importorskip("torchvision", reason="needs the extra vision")

VIDEO = Path(__file__).parent / "data" / "lerobot_v3_video"
TOP, SIDE = "observation.images.top", "observation.images.side"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def decoded(file: Path) -> dict[float, np.ndarray[Any, Any]]:
    """All frames of a file in order, by time: what random access must agree with."""
    with av.open(str(file)) as container:
        return {
            round(float(frame.time), 6): frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
            for frame in container.decode(video=0)
        }


def test_every_frame_is_the_one_at_its_time_in_any_order() -> None:
    dataset = LeRobotDataset(VIDEO, cameras=[TOP])
    frames = decoded(VIDEO / f"videos/{TOP}/chunk-000/file-000.mp4")
    assert len(frames) == len(dataset) == 75
    expected = np.stack(list(frames.values()))
    order = np.random.default_rng(0).permutation(75)
    images = dataset.__getitems__(order.tolist())[TOP]
    assert images.dtype == torch.uint8
    assert images.shape == (75, 3, 64, 64)
    assert np.array_equal(images.numpy(), expected[order])
    assert len({image.tobytes() for image in expected}) > 60  # the frames do differ


def test_pictures_are_found_where_float32_cannot_hold_their_time(tmp_path: Path) -> None:
    """4096 s into an episode a third of a second is 1.6e-4 s off, more than the tolerance."""
    count, fps = 12_320, 3
    grey = (np.arange(count) % 5 * 50).astype(np.uint8)
    pictures = np.broadcast_to(grey[:, None, None, None], (count, 32, 32, 3))
    zeros = np.zeros((count, 1), np.float32)
    write_dataset(tmp_path, [Episode(zeros, zeros, "wait", {TOP: pictures})], fps=fps)
    dataset = LeRobotDataset(tmp_path, cameras=[TOP])
    last = list(range(4096 * fps, count))
    images = dataset.__getitems__(last)[TOP]
    found = images.double().mean(dim=(1, 2, 3)).numpy()
    assert np.abs(found - grey[last]).max() < 10


def test_the_past_of_a_camera_stops_at_its_episode() -> None:
    dataset = LeRobotDataset(VIDEO, {TOP: [-0.1, 0.0]}, cameras=[TOP])
    whole = LeRobotDataset(VIDEO, cameras=[TOP])
    first = dataset.metadata.episodes[1].first
    batch = dataset.__getitems__([first, first + 1])
    assert batch[TOP].shape == (2, 2, 3, 64, 64)
    assert batch[f"{TOP}_is_pad"].tolist() == [[True, False], [False, False]]
    for row, frames in enumerate(([first, first], [first, first + 1])):
        assert torch.equal(batch[TOP][row], whole.__getitems__(frames)[TOP])


def test_cameras_that_were_not_asked_for_are_not_decoded() -> None:
    assert TOP not in LeRobotDataset(VIDEO)[0]
    assert TOP not in LeRobotDataset(VIDEO).stats


def several_files(root: Path) -> None:
    """Cut the third episode off into files of its own, and add a second camera turned by 90."""
    shutil.copytree(VIDEO, root)
    rows = pq.read_table(root / EPISODES).to_pylist()
    start, from_s = rows[2]["dataset_from_index"], rows[2][f"videos/{TOP}/from_timestamp"]
    table = pq.read_table(root / "data/chunk-000/file-000.parquet")
    (root / "data/chunk-001").mkdir()
    pq.write_table(table.slice(0, start), root / "data/chunk-000/file-000.parquet")
    pq.write_table(table.slice(start), root / "data/chunk-001/file-000.parquet")
    frames = list(decoded(VIDEO / f"videos/{TOP}/chunk-000/file-000.mp4").values())
    for camera, turns in ((TOP, 0), (SIDE, 1)):
        turned = [np.rot90(frame, turns, axes=(1, 2)) for frame in frames]
        write_video(root / f"videos/{camera}/chunk-000/file-000.mp4", turned[:start])
        write_video(root / f"videos/{camera}/chunk-001/file-003.mp4", turned[start:])
    for row in rows:
        last = row is rows[2]
        row["data/chunk_index"] = int(last)
        for camera in (TOP, SIDE):
            row[f"videos/{camera}/chunk_index"] = int(last)
            row[f"videos/{camera}/file_index"] = 3 if last else 0
            row[f"videos/{camera}/from_timestamp"] = row[f"videos/{TOP}/from_timestamp"]
    for camera in (TOP, SIDE):
        rows[2][f"videos/{camera}/from_timestamp"] -= from_s
    pq.write_table(pa.Table.from_pylist(rows), root / EPISODES)
    for name, part in (("info", "features"), ("stats", None)):
        path = root / f"meta/{name}.json"
        document = json.loads(path.read_text())
        section = document[part] if part else document
        section[SIDE] = section[TOP]
        path.write_text(json.dumps(document))


def write_video(file: Path, frames: list[np.ndarray[Any, Any]]) -> None:
    """Without loss, so that colours can be compared."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264rgb", rate=10, options={"qp": "0", "g": "7"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, "rgb24"
        for frame in frames:
            picture = np.ascontiguousarray(frame.transpose(1, 2, 0))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def test_several_cameras_and_files_are_read(tmp_path: Path) -> None:
    root = tmp_path / "dataset"
    several_files(root)
    dataset = LeRobotDataset(root, {"action": [0.0, 0.1]}, cameras=[TOP, SIDE])
    one = LeRobotDataset(VIDEO, {"action": [0.0, 0.1]}, cameras=[TOP])
    order = np.random.default_rng(1).permutation(75).tolist()
    found, expected = dataset.__getitems__(order), one.__getitems__(order)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert torch.equal(found[SIDE], torch.rot90(expected[TOP], 1, (2, 3)))


def test_workers_decode_the_same(tmp_path: Path) -> None:
    dataset = LeRobotDataset(VIDEO, cameras=[TOP])
    dataset[0]  # an open file must not be shared with the workers
    sampler = GlobalBatchSampler(75, 16, seed=1)
    alone, helped = (
        list(islice(iter(build_loader(dataset, sampler, num_workers=n)), 6)) for n in (0, 2)
    )
    assert all(torch.equal(a[TOP], b[TOP]) for a, b in zip(alone, helped, strict=True))


def test_what_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names 'top', .* It has: observation.images.top"):
        LeRobotDataset(VIDEO, cameras=["top"])
    with pytest.raises(ConfigError, match=r"the feature 'observation.images.top' is missing"):
        LeRobotDataset(VIDEO, {TOP: [0.0]})
    root = tmp_path / "dataset"
    shutil.copytree(VIDEO, root)
    file = root / f"videos/{TOP}/chunk-000/file-000.mp4"
    whole = file.read_bytes()
    file.write_bytes(b"no video")
    with pytest.raises(ConfigError, match=r"file-000.mp4 is not a readable video"):
        LeRobotDataset(root, cameras=[TOP])
    file.unlink()
    with pytest.raises(ConfigError, match=r"file-000.mp4 is missing"):
        LeRobotDataset(root, cameras=[TOP])
    file.write_bytes(whole)
    rows = pq.read_table(root / EPISODES).to_pylist()
    rows[1][f"videos/{TOP}/from_timestamp"] += 0.03
    pq.write_table(pa.Table.from_pylist(rows), root / EPISODES)
    with pytest.raises(
        ConfigError,
        match=r"does not have the picture of frame 0 of episode 1 and of 24 others: it "
        r"belongs at 2.0300 s, the nearest is at 2.0000 s .*--dataset.tolerance_s 0.033",
    ):
        LeRobotDataset(root, cameras=[TOP])


def seeing(**changes: Any) -> tuple[ACTPolicy, Preprocessor, LeRobotDataset]:
    config = ACTConfig(
        cameras=(TOP,), dim_model=32, chunk_size=4, dim_feedforward=64, dropout=0.0, **changes
    )
    dataset = LeRobotDataset.from_config(DatasetConfig(root=str(VIDEO)), config)
    torch.manual_seed(0)
    policy = ACTPolicy(config, dataset.spec)
    return policy, Preprocessor.from_stats(dataset.stats, config.normalization()), dataset


def test_pictures_are_normalized_per_channel_in_zero_to_one() -> None:
    _, preprocessor, dataset = seeing()
    batch = dataset.__getitems__(range(75))
    images = preprocessor(batch)[TOP]
    stats = dataset.stats[TOP]
    # The file says that red and green are constant, so that only their mean is taken off.
    assert stats.std[0] == 0
    scale = np.array([1.0, 1.0, stats.std[2, 0, 0]])[:, None, None]
    expected = torch.from_numpy((batch[TOP].numpy() / 255 - stats.mean) / scale)
    torch.testing.assert_close(images, expected.float(), atol=1e-4, rtol=1e-4)
    assert images.mean(dim=(0, 2, 3)).abs().max() < 0.1


def test_act_sees_and_learns_with_its_backbone() -> None:
    policy, preprocessor, dataset = seeing(use_vae=False)
    batch = preprocessor(dataset.__getitems__(range(0, 75, 15)))
    blind = {**batch, TOP: torch.zeros_like(batch[TOP])}
    policy.eval()
    assert policy.predict_action_chunk(batch).shape == (5, 4, 2)
    unseeing = policy.predict_action_chunk(blind)
    assert not torch.allclose(policy.predict_action_chunk(batch), unseeing)
    optimizer = torch.optim.AdamW(policy.train().parameters(), lr=3e-4)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = policy(batch)[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert policy.image is not None
    assert all(p.grad is not None and p.grad.any() for p in policy.image.parameters())


def test_a_picture_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    """Group norms, not batch norms: a step is the same however its batch is split."""
    policy, preprocessor, dataset = seeing(use_vae=False)
    batch = preprocessor(dataset.__getitems__([0, 20, 40]))
    alone = {name: value[:1] for name, value in batch.items()}
    together = policy.train().predict_action_chunk(batch)[:1]
    torch.testing.assert_close(policy.predict_action_chunk(alone), together, atol=1e-4, rtol=1e-4)
