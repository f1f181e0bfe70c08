"""The success classifier: its labels, its loss, and that it finds the ends of demonstrations."""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallel_config import ConfigError, Topology
from parallel_train.config import TrainConfig
from parallel_train.data import columns
from parallel_train.data.config import DatasetConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler
from parallel_train.data.spec import NUMBERS, DataSpec, Feature
from parallel_train.policies.processors import Preprocessor
from parallel_train.policies.reward.configuration import RewardConfig
from parallel_train.policies.reward.modeling import RewardModel
from parallel_train.run.task import build_task

SPEC = DataSpec(
    10,
    {
        "observation.state": Feature("float32", (5,)),
        "next.success": Feature("bool", (1,)),
        "action": Feature("float32", (3,)),
    },
    ("open", "close"),
)


def model(spec: DataSpec = SPEC, **changes: Any) -> RewardModel:
    torch.manual_seed(0)
    return RewardModel(RewardConfig(**{"dim_model": 16, "dropout": 0.0, **changes}), spec)


def test_frames_near_the_end_of_an_episode_are_solved() -> None:
    config = RewardConfig()
    dataset = LeRobotDataset.from_config(DatasetConfig(episodes=(3,)), config)
    batch = dataset.__getitems__(range(len(dataset)))
    labels = RewardModel(config, dataset.spec)._labels(batch)
    assert labels.tolist() == [0.0] * (len(dataset) - 10) + [1.0] * 10


def test_loss_is_the_weighted_cross_entropy() -> None:
    reward = model(label="next.success", positive_weight=3.0)
    success = torch.tensor([True, False, False, True])[:, None]
    batch = {
        "observation.state": torch.randn(4, 5),
        "task_index": torch.tensor([0, 1, 0, 1]),
        "next.success": success,
    }
    loss, metrics = reward(batch)
    probability = reward.predict_success(batch)
    assert probability.shape == (4,)
    weights = torch.tensor([3.0, 1.0, 1.0, 3.0])
    expected = F.binary_cross_entropy(probability, success[:, 0].float(), weights)
    torch.testing.assert_close(loss, expected)
    right = ((probability > 0.5) == success[:, 0]).float().mean()
    torch.testing.assert_close(metrics["accuracy"], right)
    assert metrics["solved"].item() == 0.5


def test_it_learns_to_tell_solved_frames_in_episodes_it_has_not_seen() -> None:
    config = RewardConfig()
    held_out = tuple(range(15, 80, 20))
    seen = tuple(e for e in range(80) if e not in held_out)
    train = LeRobotDataset.from_config(DatasetConfig(episodes=seen), config)
    preprocessor = Preprocessor.from_stats(train.stats, config.normalization())
    torch.manual_seed(0)
    reward = RewardModel(config, train.spec)
    optimizer = torch.optim.AdamW(reward.parameters(), lr=1e-3)
    for batch in islice(build_loader(train, GlobalBatchSampler(len(train), 64)), 300):
        optimizer.zero_grad()
        reward(preprocessor(batch))[0].backward()
        optimizer.step()
    test = LeRobotDataset.from_config(DatasetConfig(episodes=held_out), config)
    batch = preprocessor(test.__getitems__(range(len(test))))
    labels, found = reward._labels(batch), reward.eval().predict_success(batch)
    assert 0.1 < labels.mean() < 0.3
    assert found[labels == 1].mean() > 0.6
    assert found[labels == 0].mean() < 0.15


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy.label = 'won' is not a feature.*next.success"):
        model(label="won")
    blind = dataclasses.replace(SPEC, features={"action": SPEC.features["action"]})
    with pytest.raises(ConfigError, match=r"a float vector named observation"):
        model(blind)
    with pytest.raises(
        ConfigError, match=r"policy.horizon_s = 0, but it must be a positive number"
    ):
        model(horizon_s=0)
    reward = model()
    assert {type(m).__name__ for m in reward.modules()} >= set(reward._fsdp_wrap_modules)
    assert all(callable(getattr(reward, name)) for name in reward._fsdp_forward_methods)


@pytest.mark.parametrize(
    ("dtype", "shape", "is_label"),
    [
        ("bool", (1,), True),
        ("float32", (1,), True),
        ("int64", (1,), True),
        ("float32", (3,), False),
        ("string", (1,), False),
        ("video", (64, 64, 3), False),
    ],
)
def test_a_label_is_one_number_per_frame(dtype, shape, is_label):
    state = Feature("float32", (4,))
    spec = DataSpec(10, {"observation.state": state, "won": Feature(dtype, shape)})
    config = RewardConfig(dim_model=16, label="won")
    if is_label:
        RewardModel(config, spec)
        return
    with pytest.raises(ConfigError, match=rf"policy.label = 'won' is {dtype} of shape"):
        RewardModel(config, spec)


def test_dtypes_of_numbers_are_those_that_are_read():
    assert tuple(columns.DTYPES) == NUMBERS


def test_labels_lie_between_zero_and_one():
    one = Topology(dp_replicate=1)

    def build(label):
        policy = RewardConfig(dim_model=16, label=label)
        config = TrainConfig(policy=policy, dataset=DatasetConfig(episodes=(0,)))
        return build_task(config, one, 0, samples_seen=0, device=torch.device("cpu"))

    assert build("episode_index").num_parameters > 0
    with pytest.raises(ConfigError, match=r"frame_index is \[2.*numbers from 0 to 1"):
        build("frame_index")
