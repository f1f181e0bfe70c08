"""What a resume keeps and what it may change: pure functions over configs."""

import dataclasses
import json
import shlex

import pytest

from parallel_config import (
    ConfigError,
    GradientAccumulationConfig,
    OptimizerConfig,
    ParallelismConfig,
    Topology,
)
from parallel_train.cli.parsing import parse
from parallel_train.config import TrainConfig
from parallel_train.data.split import EvalConfig
from parallel_train.run.adapt import (
    adapt,
    changed_paths,
    differences,
    global_batch,
    kept_hyperparameters,
)
from parallel_train.run.job import Job
from parallel_train.run.signals import StopRequest
from parallel_train.train import train


def adapted(saved, world_size, *, batch_size=8, accumulation=1, wanted=None, **options):
    config = TrainConfig(batch_size=batch_size)
    accelerator = dataclasses.replace(
        config.accelerator, gradient_accumulation=GradientAccumulationConfig(steps=accumulation)
    )
    config = dataclasses.replace(config, accelerator=accelerator)
    defaults = {
        "parallelism_given": False,
        "accumulation_given": False,
        "allow_batch_change": False,
    }
    return adapt(
        config,
        world_size=world_size,
        saved_topology=saved,
        saved_global_batch=wanted or global_batch(config, saved),
        **{**defaults, **options},
    )


@pytest.mark.parametrize(
    ("saved", "world_size", "expected"),
    [
        ((1, 1), 1, (1, 1)),
        ((1, 1), 2, (2, 1)),
        ((2, 1), 4, (4, 1)),
        ((2, 1), 1, (1, 1)),
        ((1, 2), 4, (1, 4)),
        ((1, 4), 2, (1, 2)),
        ((1, 2), 1, (1, 1)),
        ((2, 2), 8, (4, 2)),
        ((2, 2), 2, (1, 2)),
    ],
)
def test_the_kind_is_kept_and_refilled(saved, world_size, expected):
    saved = Topology(dp_replicate=saved[0], dp_shard=saved[1])
    found = adapted(saved, world_size, allow_batch_change=True)
    assert (found.topology.dp_replicate, found.topology.dp_shard) == expected
    # The config that is saved reproduces the run alone.
    assert found.config.parallelism.resolve(world_size) == found.topology


def test_hsdp_lists_the_choices_when_its_shards_do_not_fit():
    with pytest.raises(
        ConfigError, match=r"dp_replicate 3 --parallelism.dp_shard 1 or .* multiple of 2"
    ):
        adapted(Topology(dp_replicate=2, dp_shard=2), 3)


def test_flags_decide_when_they_are_given():
    found = adapted(Topology(dp_replicate=2), 2, parallelism_given=True)
    assert found.topology == Topology(dp_replicate=2)


def test_the_global_batch_is_kept_by_accumulation():
    found = adapted(Topology(dp_replicate=4), 2, batch_size=8)
    assert found.config.accelerator.gradient_accumulation.steps == 2
    assert any("keeps the global batch of 32 samples" in note for note in found.notes)
    found = adapted(Topology(dp_replicate=2), 4, batch_size=8, accumulation=2)
    assert found.config.accelerator.gradient_accumulation.steps == 1


def test_a_batch_that_cannot_be_kept_is_refused_with_the_ones_that_fit():
    with pytest.raises(ConfigError, match=r"global batch is 16\. Use --batch_size .*16"):
        adapted(Topology(dp_replicate=2), 1, batch_size=8, wanted=16, accumulation_given=True)
    with pytest.raises(ConfigError, match="--allow_batch_change"):
        adapted(Topology(dp_replicate=2), 3, batch_size=8)
    found = adapted(Topology(dp_replicate=2), 3, batch_size=8, allow_batch_change=True)
    assert "16 -> 24 samples" in found.notes[-1]


def test_changes_are_listed_with_what_they_mean():
    saved = TrainConfig(steps=100)
    now = TrainConfig(steps=200, optimizer=OptimizerConfig(lr=5e-4), output_dir="elsewhere")
    assert differences(saved, now) == [
        "steps: 100 -> 200 (the schedule now ends there)",
        "optimizer.lr: 0.001 -> 0.0005 (in force from the next update)",
    ]
    assert kept_hyperparameters(changed_paths(saved, now)) == ("lr", "schedule")
    assert kept_hyperparameters(changed_paths(saved, saved)) == ()
    decay = TrainConfig(steps=100, optimizer=OptimizerConfig(weight_decay=0.5))
    assert kept_hyperparameters(changed_paths(saved, decay)) == ("weight_decay",)


def sgd(**fields):
    return TrainConfig(optimizer=OptimizerConfig(type="sgd", **fields))


def test_fields_that_sgd_does_not_have_are_reported_as_without_effect():
    nothing = "(without effect: sgd reads only the first of betas, as its momentum)"
    for now in (sgd(betas=(0.9, 0.95)), sgd(eps=1e-6)):
        (line,) = differences(sgd(), now)
        assert line.endswith(nothing)
    (line,) = differences(sgd(), sgd(betas=(0.5, 0.999)))
    assert line.endswith("(in force from the next update)")


def test_a_changed_momentum_of_sgd_is_in_force(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLEL_DEVICE", "cpu")
    flags = (
        "--policy.dim_model 16 --policy.n_heads 2 --policy.dim_feedforward 16 --batch_size 2 "
        "--policy.no-use_vae --dataset.episodes 0 --optimizer.type sgd --optimizer.lr 1e-5"
    )
    run = tmp_path / "run"
    new = parse(["train", *shlex.split(flags), "--output_dir", str(run), "--steps", "1"])
    train(Job(config=new.command.run), StopRequest())
    again = ["resume", str(run), "--steps", "2", "--optimizer.betas", "0.5", "0.999"]
    train(Job(config=parse(again).command.run, resume="must", checkpoint=run), StopRequest())
    index = run / "checkpoints/000002/training_state/optimizer.json"
    assert [group["hyper"]["momentum"] for group in json.loads(index.read_text())["groups"]] == [
        0.5
    ]


def test_episodes_that_are_held_out_late_are_reported_as_trained_on():
    saved = TrainConfig()
    for now, path in [
        (TrainConfig(eval=EvalConfig(fraction=0.2)), "eval.fraction: 0.0 -> 0.2"),
        (TrainConfig(eval=EvalConfig(episodes=(3,))), "eval.episodes: none -> [3]"),
    ]:
        (line,) = differences(saved, now)
        assert line.startswith(f"{path} (an episode held out only from here on was trained on")
    (line,) = differences(saved, TrainConfig(eval=EvalConfig(freq=7)))
    assert line == "eval.freq: 100 -> 7 (in force)"


def test_a_resolved_config_is_written_with_its_degrees():
    config = TrainConfig(parallelism=ParallelismConfig(dp_shard=-1))
    found = adapt(
        config,
        world_size=4,
        saved_topology=Topology(dp_shard=4),
        saved_global_batch=global_batch(config, Topology(dp_shard=4)),
        parallelism_given=True,
        accumulation_given=False,
        allow_batch_change=False,
    )
    assert found.config.parallelism.dp_shard == 4
