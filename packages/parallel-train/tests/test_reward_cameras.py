"""The success classifier with cameras: trained on ranks, converted, published, loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_ckpt.convert import convert
from parallel_config import ConfigError
from parallel_testing.hub_fixture import CLIENT_WARNING, local_hub  # noqa: F401
from parallel_testing.programs import run_program, run_ptrain
from parallel_testing.ranks import run_ranks
from parallel_train.cli.app import run
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.policies.loading import load_policy
from parallel_train.policies.reward.configuration import RewardConfig
from parallel_train.policies.reward.modeling import RewardModel

pytest.importorskip("av", reason="needs the extra vision")
pytest.importorskip("torchvision", reason="needs the extra vision")

VIDEO = Path(__file__).parent / "data/lerobot_v3_video"
TOP = "observation.images.top"
PICTURES = DataSpec(10, {TOP: Feature("video", (64, 64, 3)), "action": Feature("float32", (2,))})


def model(**changes: Any) -> RewardModel:
    torch.manual_seed(0)
    config = RewardConfig(**{"cameras": (TOP,), "dim_model": 16, "dropout": 0.0, **changes})
    return RewardModel(config, PICTURES)


def logits(reward: RewardModel, images: Tensor) -> Tensor:
    return reward.predict_success({TOP: images}).logit()


def test_it_sees_where_something_is() -> None:
    """Not only whether: the same patch at two places gives two answers."""
    reward = model().eval()
    left, right = torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 64, 64)
    left[..., 24:40, 0:16] = 3.0
    right[..., 24:40, 48:64] = 3.0
    empty = logits(reward, torch.zeros(1, 3, 64, 64))
    assert (logits(reward, left) - empty).abs() > 1e-4
    assert (logits(reward, left) - logits(reward, right)).abs() > 1e-5


def test_it_learns_from_pictures_alone() -> None:
    reward = model()
    images = torch.zeros(6, 3, 64, 64)
    for number in range(6):
        images[number, number % 3, 8 * number : 8 * number + 16, 20:40] = 2.0
    solved = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)
    batch = {TOP: images, "action_is_pad": solved[:, None]}
    optimizer = torch.optim.AdamW(reward.parameters(), lr=2e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss, metrics = reward(batch)
        loss.backward()
        optimizer.step()
    assert metrics["accuracy"] == 1.0
    # A bias of the keys never has an effect: it moves every score alike.
    idle = [n for n, p in reward.named_parameters() if p.grad is None or not p.grad.any()]
    assert all(name.endswith("to_k.bias") for name in idle), idle


def train_on_ranks(shard: int, folder: str) -> None:
    from parallel_config import CheckpointFormat, ParallelismConfig
    from parallel_train.config import TrainConfig
    from parallel_train.data.config import DatasetConfig
    from parallel_train.run.job import Job
    from parallel_train.run.signals import StopRequest
    from parallel_train.train import train

    config = TrainConfig(
        policy=RewardConfig(cameras=(TOP,), dim_model=16, dropout=0.0, horizon_s=0.5),
        dataset=DatasetConfig(root=str(VIDEO)),
        parallelism=ParallelismConfig(dp_shard=shard),
        checkpoint_format=CheckpointFormat.DCP,
        output_dir=folder,
        batch_size=4 // shard,
        steps=4,
        log_freq=100,
    )
    with StopRequest() as stop:
        train(Job(config=config), stop)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_trained_sharded_and_converted_it_loads_again(tmp_path: Path) -> None:
    run_ranks(train_on_ranks, 1, 1, str(tmp_path / "one"), init=False, timeout_s=180)
    run_ranks(train_on_ranks, 2, 2, str(tmp_path / "two"), timeout_s=240)
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    convert(tmp_path / "two", output=tmp_path / "model")
    loaded, converted = load_policy(tmp_path / "two"), load_policy(tmp_path / "model")
    batch = LeRobotDataset(VIDEO, cameras=[TOP]).__getitems__([0, 30, 74])
    success = converted.predict_success(batch)
    assert success.shape == (3,)
    assert ((success > 0) & (success < 1)).all()
    assert torch.equal(success, loaded.predict_success(batch))
    blind = {**batch, TOP: torch.zeros_like(batch[TOP])}
    assert not torch.equal(success, converted.predict_success(blind))


@pytest.mark.filterwarnings(CLIENT_WARNING)
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_published_and_loaded_it_answers_the_same(tmp_path: Path, hub: Any, dtype: str) -> None:
    """With the train command's own sharded run, and from its name on the Hub alone."""
    run_ptrain(
        *["train", "--policy.type", "reward", "--policy.cameras", TOP],
        *["--policy.dim_model", "16", "--dataset.root", VIDEO, "--steps", "2", "--batch_size", "2"],
        *["--nproc_per_node", "2", "--parallelism.dp_shard", "2", "--checkpoint_format", "dcp"],
        *["--output_dir", tmp_path / "run"],
        cwd=tmp_path,
    )
    words = ["publish", str(tmp_path / "run"), "--repo_id", "user/reward", "--dtype", dtype]
    assert run(words) == 0
    batch = LeRobotDataset(VIDEO, cameras=[TOP]).__getitems__([0, 30, 74])
    trained, published = load_policy(tmp_path / "run"), load_policy("user/reward")
    expected, success = trained.predict_success(batch), published.predict_success(batch)
    assert success.shape == (3,)
    assert len(set(success.tolist())) == 3
    if dtype == "keep":
        assert torch.equal(success, expected)
    else:
        torch.testing.assert_close(success, expected, atol=2e-2, rtol=0)
    for meta in (False, True):
        alone = RewardModel.from_pretrained("user/reward", meta=meta)
        assert torch.equal(alone.predict_success(published.preprocessor(batch)), success)
    card = hub.files("user/reward")["README.md"].decode()
    code = card.split("```python\n")[1].split("```")[0]
    (tmp_path / "of_the_card.py").write_text(f"{code}\nprint(success.shape[0])\n")
    done = run_program("of_the_card", [], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("1")


def test_norms_of_pretrained_weights_are_saved_and_nothing_is_fetched(tmp_path: Path) -> None:
    reward = model(vision_weights="IMAGENET1K_V1").eval()
    for name, buffer in reward.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    reward.save_pretrained(tmp_path)
    images = torch.rand(2, 3, 64, 64)
    images[1, :, 16:40, 16:40] = 20.0
    expected = logits(reward, images)
    assert (expected[0] - expected[1]).abs() > 1e-4
    for meta in (False, True):
        again = RewardModel.from_pretrained(tmp_path, meta=meta)
        assert torch.equal(logits(again, images), expected)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names 'front', which the dataset does not have"):
        model(cameras=("front",))
    with pytest.raises(ConfigError, match=r"policy.dim_model = 15, but it must be even"):
        model(dim_model=15)
    with pytest.raises(ConfigError, match=r"a float vector named observation"):
        model(cameras=())
