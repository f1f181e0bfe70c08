"""A resumed run whose dataset is no longer the one that its weights were trained on."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel_config import ConfigError
from parallel_train.cli import resume as resuming
from parallel_train.cli import train as training
from parallel_train.cli.parsing import parse
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.data.writing import Episode, write_dataset
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.processors import Preprocessor
from parallel_train.policies.reward.configuration import RewardConfig
from parallel_train.policies.wam.configuration import WAMConfig
from parallel_train.run.same_data import feature_problems
from parallel_train.run.signals import StopRequest
from parallel_train.train import train

SMALL = shlex.split(
    "--policy.dim_model 16 --policy.n_heads 2 --policy.dim_feedforward 16 --policy.n_vae_layers 1 "
    "--policy.chunk_size 4 --batch_size 4 --log_freq 1000 --steps 2"
)


def write(root: Path, tasks: str, *, size: float = 1.0, fps: int = 10) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            (size * rng.normal(size=(12, 3))).astype(np.float32),
            rng.normal(size=(12, 2)).astype(np.float32),
            task,
        )
        for task in tasks.split()
    ]
    write_dataset(root, episodes, fps=fps)
    return root


def go_on(run: Path, *flags: str) -> None:
    train(resuming.job_of(parse(["resume", str(run), "--steps", "3", *flags])), StopRequest())


def scale(run: Path, step: int, name: str = "observation.state") -> torch.Tensor:
    folder = run / f"checkpoints/{step:06d}/pretrained_model"
    return Preprocessor.from_pretrained(folder).normalizers[name].scale


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_DEVICE", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ds` (tasks open, close) and the `run` of two updates on it."""
    folder = tmp_path_factory.mktemp("trained")
    data, run = write(folder / "ds", "open close open close"), folder / "run"
    before = os.environ.get("PARALLEL_DEVICE")
    os.environ["PARALLEL_DEVICE"] = "cpu"
    try:
        flags = ["--dataset.root", str(data), "--output_dir", str(run)]
        train(training.job_of(parse(["train", *SMALL, *flags])), StopRequest())
    finally:
        os.environ.pop("PARALLEL_DEVICE")
        if before is not None:
            os.environ["PARALLEL_DEVICE"] = before
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "run", tmp_path / "run", symlinks=True))


def test_a_resume_on_the_same_data_prints_nothing_about_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on(run)
    said = capsys.readouterr().out
    assert "normalization" not in said
    assert "training data" not in said
    assert torch.equal(scale(run, 3), scale(run, 2))
    state = json.loads((run / "checkpoints/000003/training_state/data.json").read_text())
    assert (state["samples"], state["episodes"]) == (48, 4)


def test_the_checkpoints_normalization_is_kept_and_what_is_new_is_reported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "more", "open close open close open close open", size=5)
    go_on(run, "--dataset.root", str(data))
    said = capsys.readouterr().out
    assert torch.equal(scale(run, 3), scale(run, 2))
    assert "normalization of observation.state: the checkpoint's is kept; these data would" in said
    assert "samples of the training data: 48 -> 84" in said
    assert "episodes of the training data: 4 -> 7" in said


def test_new_statistics_are_taken_where_they_are_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "big", "open close open close", size=5)
    go_on(run, "--dataset.root", str(data), "--dataset.stats", "file")
    assert "(--dataset.stats was given)" in capsys.readouterr().out
    assert (scale(run, 3) / scale(run, 2)).tolist() == pytest.approx([5, 5, 5], rel=1e-4)


def test_another_mode_of_normalization_is_in_force(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on(run, "--policy.state_normalization", "min_max")
    said = capsys.readouterr().out
    assert "normalization of observation.state: mean_std -> min_max, of these data" in said
    assert not torch.equal(scale(run, 3), scale(run, 2))
    assert torch.equal(scale(run, 3, "action"), scale(run, 2, "action"))


@pytest.mark.parametrize(
    ("tasks", "fps", "message"),
    [
        ("close open", 10, "has 'close' as task 0, .* trained with 'open' as task 0"),
        ("open", 10, "has 1 of the 2 tasks, .* trained with 'close' as task 1"),
        ("open close", 20, "has 20 fps, but the checkpoint was trained at 10"),
    ],
)
def test_data_that_mean_something_else_are_refused(
    run: Path, tmp_path: Path, tasks: str, fps: int, message: str
) -> None:
    data = write(tmp_path / "other", tasks, fps=fps)
    with pytest.raises(ConfigError, match=message) as caught:
        go_on(run, "--dataset.root", str(data))
    assert "or start a new run on these data, with another --output_dir" in str(caught.value)


def test_a_task_that_no_model_learned_the_number_of_may_be_reworded(
    tmp_path: Path,
) -> None:
    data, run = write(tmp_path / "ds", "open open"), tmp_path / "run"
    flags = ["--dataset.root", str(data), "--output_dir", str(run)]
    train(training.job_of(parse(["train", *SMALL, *flags])), StopRequest())
    write(data, "unlock unlock")
    go_on(run)
    assert (run / "checkpoints/000003").is_dir()


def test_only_what_the_policy_reads_is_compared() -> None:
    vector, narrow = Feature("float32", (3,)), Feature("float32", (2,))
    state = {"action": vector, "observation.state": vector}
    saved = DataSpec(10, {**state, "observation.effort": vector})
    for config in (WAMConfig(), RewardConfig(label="observation.effort")):
        assert not list(feature_problems(saved, DataSpec(10, state), config.reads))
        changed = DataSpec(10, {**state, "observation.state": narrow})
        assert len(list(feature_problems(saved, changed, config.reads))) == 1
    moved = DataSpec(10, {**state, "action": narrow})
    assert len(list(feature_problems(saved, moved, WAMConfig().reads))) == 1


def test_a_new_run_refuses_a_world_that_is_not_an_observation(tmp_path: Path) -> None:
    data = write(tmp_path / "ds", "open")
    flags = shlex.split("--policy.type wam --policy.world effort --steps 1 --batch_size 4")
    job = training.job_of(
        parse(["train", *flags, "--dataset.root", str(data), "--output_dir", f"{tmp_path}/run"])
    )
    with pytest.raises(ConfigError, match=r"policy\.world names 'effort', but a name"):
        train(job, StopRequest())


@pytest.mark.parametrize("config", [ACTConfig, RewardConfig])
def test_numbers_of_tasks_are_learned_where_there_are_several(
    config: type[ACTConfig | RewardConfig],
) -> None:
    assert config().knows_task_numbers(2)
    assert not config().knows_task_numbers(1)
    assert not config(use_task=False).knows_task_numbers(2)
    assert not WAMConfig().knows_task_numbers(2)


def test_entries_of_a_vector_in_another_order_are_refused(run: Path) -> None:
    file = run / "checkpoints/000002/pretrained_model/config.json"
    document = json.loads(file.read_text())
    spec = DataSpec.from_plain(document["data"])
    state = spec.features["observation.state"]

    def named(*names: str) -> DataSpec:
        feature = dataclasses.replace(state, names=names)
        return DataSpec(10, {**spec.features, "observation.state": feature}, spec.tasks)

    assert not list(feature_problems(named("x", "y", "z"), named("x", "y", "z")))
    assert not list(feature_problems(named("x", "y", "z"), named("a", "b", "c")))
    (problem,) = feature_problems(named("x", "y", "z"), named("x", "z", "y"))
    assert "in the order ['x', 'z', 'y']" in problem.message
    wide = dataclasses.replace(state, shape=(4,))
    other = DataSpec(10, {**spec.features, "observation.state": wide}, spec.tasks)
    assert "of shape [4]" in next(feature_problems(spec, other)).message
    (problem,) = feature_problems(spec, DataSpec(10, {"action": spec.features["action"]}))
    assert "--dataset.rename NAME=observation.state" in problem.remedy
