"""Rollouts in MetaWorld: seeded, with the expert above and random actions below."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from parallel_config import ConfigError
from parallel_train.data.config import EMBEDDED_ROOT
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.evaluate import evaluate_policy, wilson
from parallel_train.processors import Preprocessor

pytest.importorskip("metaworld", reason="needs the extra sim")

from parallel_train.simulation import TASKS, Simulator, expert


class Replay(torch.nn.Module):
    """A policy that knows where reach-v3 wants the hand: it moves straight to the goal."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(10.0))
        self.resets = 0
        self.tasks: set[int] = set()

    def reset(self) -> None:
        self.resets += 1

    def select_action(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        state = batch["observation.state"]
        self.tasks.add(int(batch["task_index"]))
        move = self.gain.detach() * (state[:, -3:] - state[:, :3])
        return torch.cat([move, torch.zeros(1, 1)], dim=1).clamp(-1, 1)


def test_policy_expert_and_random_play_the_same_episodes() -> None:
    spec, policy = LeRobotDataset(EMBEDDED_ROOT).spec, Replay()
    shown: list[Any] = []
    results = evaluate_policy(
        policy, Preprocessor(), spec, ["reach-v3"], episodes=4, seed=3, on_result=shown.append
    )
    assert shown == results
    rates = {result.controller: result.rate for result in results}
    assert rates == {"policy": 1.0, "expert": 1.0, "random": 0.0}
    assert policy.resets == 4
    assert policy.tasks == {0}
    line = " ".join(str(results[0]).split())
    assert line == "reach-v3 policy 4/4 100.0% (95%: 51.0% to 100.0%)"


def test_an_episode_is_decided_by_task_seed_and_number() -> None:
    one, two = (Simulator("push-v3", 5).rollout(expert("push-v3"), 2) for _ in range(2))
    assert np.array_equal(one.observations, two.observations)
    assert np.array_equal(one.actions, two.actions)
    other = Simulator("push-v3", 5).rollout(expert("push-v3"), 3)
    assert not np.array_equal(one.observations[0], other.observations[0])


@pytest.mark.parametrize("task", TASKS)
def test_the_embedded_episodes_are_what_the_expert_plays(task: str) -> None:
    """The recording script's numbers; other versions of the simulator may round differently."""
    dataset = LeRobotDataset(EMBEDDED_ROOT)
    number = list(TASKS).index(task) * 20 + 1
    episode = dataset.metadata.episodes[number]
    frames = dataset.__getitems__(range(episode.first, episode.end))
    rollout = Simulator(task, 1000).rollout(expert(task), 1, frames_after_success=10)
    assert dataset.tasks[int(frames["task_index"][0])] == TASKS[task]
    np.testing.assert_allclose(
        frames["observation.state"][:20].numpy(), rollout.observations[:20], atol=1e-3
    )
    assert abs(len(rollout.actions) - (episode.end - episode.first)) <= 2


def test_wilson_intervals() -> None:
    assert wilson(40, 50) == pytest.approx((0.6696, 0.8876), abs=1e-3)
    assert wilson(0, 50) == pytest.approx((0.0, 0.0713), abs=1e-3)
    assert wilson(50, 50) == pytest.approx((0.9287, 1.0), abs=1e-3)


def test_wrong_requests_are_refused() -> None:
    spec, policy = LeRobotDataset(EMBEDDED_ROOT).spec, Replay()
    with pytest.raises(ConfigError, match=r"'fly-v3' is no MetaWorld task"):
        evaluate_policy(policy, Preprocessor(), spec, ["fly-v3"])
    with pytest.raises(ConfigError, match=r"'door-open-v3': the policy was trained on other tasks"):
        evaluate_policy(policy, Preprocessor(), spec, ["door-open-v3"])
    with pytest.raises(ConfigError, match=r"episodes = 51, but one seed holds 50"):
        evaluate_policy(policy, Preprocessor(), spec, ["reach-v3"], episodes=51)
