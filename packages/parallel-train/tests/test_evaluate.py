"""Rollouts in MetaWorld: seeded, with the expert above and random actions below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel_config import ConfigError
from parallel_train.cli.app import run
from parallel_train.cli.evaluate import Pictures
from parallel_train.data.config import EMBEDDED_ROOT, DatasetConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.act.modeling import ACTPolicy
from parallel_train.policies.processors import Preprocessor
from parallel_train.sim.evaluate import Played, evaluate_policy, wilson

pytest.importorskip("metaworld", reason="needs the extra sim")

from PIL import Image

from parallel_train.sim.draw import SIZE, draw_rollout
from parallel_train.sim.metaworld import TASKS, Simulator, expert
from parallel_train.sim.render import HEIGHT, WIDTH, Renderer


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
    played: list[Played] = []
    results = evaluate_policy(
        policy,
        Preprocessor(),
        spec,
        ["reach-v3"],
        episodes=4,
        seed=3,
        on_result=shown.append,
        on_episode=played.append,
    )
    assert shown == results
    assert [(p.controller, p.number) for p in played] == [
        (name, number) for name in ("policy", "expert", "random") for number in range(4)
    ]
    first = {p.controller: p.rollout.observations[0] for p in played if p.number == 2}
    assert np.array_equal(first["policy"], first["random"])
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


def test_wilson_intervals_stay_within_0_and_1() -> None:
    assert wilson(40, 50) == pytest.approx((0.6696, 0.8876), abs=1e-3)
    assert wilson(0, 50) == pytest.approx((0.0, 0.0713), abs=1e-3)
    assert wilson(50, 50) == pytest.approx((0.9287, 1.0), abs=1e-3)


def test_noise_of_a_policy_is_seeded_by_the_episode() -> None:
    """Two evaluations of one checkpoint agree, whatever was drawn before."""

    class Noisy(Replay):
        def select_action(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().select_action(batch) + 0.1 * torch.randn(1, 4)

    spec = LeRobotDataset(EMBEDDED_ROOT).spec
    seen: list[list[Any]] = []
    for draws in (0, 7):
        torch.randn(draws)
        played: list[Played] = []
        evaluate_policy(
            Noisy(),
            Preprocessor(),
            spec,
            ["reach-v3"],
            episodes=2,
            max_steps=20,
            on_episode=played.append,
        )
        seen.append([p.rollout.actions for p in played if p.controller == "policy"])
    for one, two in zip(*seen, strict=True):
        assert np.array_equal(one, two)
    assert not np.array_equal(seen[0][0][:5], seen[0][1][:5])


def test_the_command_keeps_numbers_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARALLEL_DEVICE", "cpu")
    monkeypatch.setenv("MUJOCO_GL", "none")  # no such backend: pictures are drawn
    torch.manual_seed(0)
    config = ACTConfig(dim_model=16, n_heads=2, dim_feedforward=32, chunk_size=8)
    dataset = LeRobotDataset.from_config(DatasetConfig(), config)
    folder = tmp_path / "model"
    ACTPolicy(config, dataset.spec).save_pretrained(folder)
    Preprocessor.from_stats(dataset.stats, config.normalization()).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", str(folder), "--episodes", "2", "--max_steps", "30"]
    assert run(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "MuJoCo renders nothing here with MUJOCO_GL=none: pictures are drawn from the observations",
        "kept in evaluations/model: results.json, reach-v3_failed.gif",
    ]
    with Image.open(tmp_path / "evaluations/model/reach-v3_failed.gif") as image:
        assert image.size == (2 * SIZE, SIZE + 16)
    kept = json.loads((tmp_path / "evaluations/model/results.json").read_text())
    assert (kept["seed"], kept["max_steps"]) == (0, 30)
    rates = {entry["controller"]: entry["rate"] for entry in kept["results"]}
    assert rates.keys() == {"policy", "expert", "random"}
    assert rates["policy"] == 0.0
    assert kept["results"][0]["interval_95"] == pytest.approx(wilson(0, 2))
    assert run([*words, "--json", "--output", "other"]) == 0
    assert json.loads(capsys.readouterr().out)["results"] == kept["results"]
    assert (tmp_path / "other/reach-v3_failed.gif").is_file()

    def stop(pictures: Pictures, played: Played) -> None:
        if played.controller == "expert":
            raise KeyboardInterrupt

    monkeypatch.setattr(Pictures, "take", stop)
    with pytest.raises(KeyboardInterrupt):
        run([*words, "--output", "stopped"])
    kept = json.loads((tmp_path / "stopped/results.json").read_text())
    assert [entry["controller"] for entry in kept["results"]] == ["policy"]


def test_a_rollout_becomes_a_moving_picture(tmp_path: Path) -> None:
    rollout = Simulator("reach-v3", 3).rollout(expert("reach-v3"), 0)
    path = tmp_path / "deep/down.gif"
    draw_rollout(rollout, path, "reach")
    with Image.open(path) as image:
        frames = -(-len(rollout.observations) // 4)
        assert abs(image.n_frames - frames) <= 1
        assert image.size == (2 * SIZE, SIZE + 16)
        first = np.asarray(image.convert("RGB"), dtype=int)
        image.seek(image.n_frames - 1)
        last = np.asarray(image.convert("RGB"), dtype=int)
    blue = [(p[..., 2] > 150) & (p[..., 0] < 80) for p in (first, last)]
    assert 50 < blue[0].sum() < blue[1].sum()  # a dot, and later its trail too


def test_a_rollout_is_rendered_where_the_machine_can(tmp_path: Path) -> None:
    rollout, renderer = Simulator("reach-v3", 3).rollout(expert("reach-v3"), 0), Renderer()
    path = tmp_path / "deep/down.gif"
    if not renderer.render("reach-v3", 3, 0, rollout.actions, path, "reach"):
        pytest.skip(renderer.why_not)
    with Image.open(path) as image:
        assert abs(image.n_frames - len(rollout.actions) / 8) <= 2
        assert image.size == (WIDTH, HEIGHT)
        first = np.asarray(image.convert("RGB"), dtype=float)
        image.seek(image.n_frames - 1)
        last = np.asarray(image.convert("RGB"), dtype=float)
    red = [(p[..., 0] > 120) & (p[..., 1:].max(axis=-1) < 60) for p in (first, last)]
    assert min(part.mean() for part in red) > 0.02  # the arm
    moved = np.abs(first - last).max(axis=-1) > 60
    assert 0.005 < moved.mean() < 0.5


def test_a_backend_that_renders_nothing_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "none")
    renderer, actions = Renderer(), np.zeros((2, 4), np.float32)
    for _ in range(2):
        assert not renderer.render("reach-v3", 0, 0, actions, tmp_path / "x.gif", "x")
        assert renderer.why_not == "MuJoCo renders nothing here with MUJOCO_GL=none"
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr("subprocess.run", None)  # not asked again


def test_policies_that_cannot_play_are_refused() -> None:
    spec = LeRobotDataset(EMBEDDED_ROOT).spec
    with pytest.raises(
        ConfigError, match=r"is a Linear, which does not have a method select_action"
    ):
        evaluate_policy(torch.nn.Linear(1, 1), Preprocessor(), spec, ["reach-v3"])
    blind = Replay()
    blind.config = ACTConfig(cameras=("observation.images.top",))  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"looks at observation.images.top, but the simulation"):
        evaluate_policy(blind, Preprocessor(), spec, ["reach-v3"])
    other = DataSpec(10, {"observation.state": Feature("float32", (4,))}, spec.tasks)
    with pytest.raises(ConfigError, match=r"observation.state of 4 numbers; MetaWorld gives 39"):
        evaluate_policy(Replay(), Preprocessor(), other, ["reach-v3"])


def test_wrong_requests_are_refused() -> None:
    spec, policy = LeRobotDataset(EMBEDDED_ROOT).spec, Replay()
    with pytest.raises(ConfigError, match=r"'fly-v3' is not a MetaWorld task"):
        evaluate_policy(policy, Preprocessor(), spec, ["fly-v3"])
    with pytest.raises(ConfigError, match=r"'door-open-v3': the policy was trained on other tasks"):
        evaluate_policy(policy, Preprocessor(), spec, ["door-open-v3"])
    played: list[Played] = []
    for wrong in ("fly-v3", "door-open-v3"):
        with pytest.raises(ConfigError):
            evaluate_policy(
                policy, Preprocessor(), spec, ["reach-v3", wrong], on_episode=played.append
            )
    assert played == []  # nothing was played for nothing
    with pytest.raises(ConfigError, match=r"episodes = 51, but one seed holds 50"):
        evaluate_policy(policy, Preprocessor(), spec, ["reach-v3"], episodes=51)
