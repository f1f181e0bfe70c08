"""The 6B preset, scaled down, from pictures and texts to actions: on 4 ranks, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel_testing.ranks import run_ranks

pytest.importorskip("av", reason="needs the extra vision")

VIDEO = Path(__file__).parent / "data/lerobot_v3_video"
TOP = "observation.images.top"


def config_of(replicate: int, shard: int, folder: str) -> Any:
    from parallel_config import CheckpointFormat, OptimizerConfig, ParallelismConfig
    from parallel_train.config import TrainConfig
    from parallel_train.data.config import DatasetConfig
    from parallel_train.policies.wam.configuration import WAMConfig

    return TrainConfig(
        policy=WAMConfig(
            preset="6b",
            n_layers=2,
            n_heads=2,
            head_dim=16,
            width=32,
            action_width=16,
            image_size=32,
            patch_size=8,
            cameras=(TOP,),
            chunk_size=4,
            world_frames=2,
            world_stride=2,
            num_flow_steps=2,
        ),
        dataset=DatasetConfig(root=str(VIDEO)),
        parallelism=ParallelismConfig(dp_replicate=replicate, dp_shard=shard),
        checkpoint_format=CheckpointFormat.DCP,
        optimizer=OptimizerConfig(lr=3e-3),
        output_dir=folder,
        batch_size=2,
        steps=12,
        log_freq=100,
    )


def train_and_sample(replicate: int, shard: int, folder: str) -> dict[str, Any]:
    """Train, then act on the sharded model; the difference to the same weights in one piece."""
    import torch
    from torch.distributed.tensor import DTensor

    from parallel_ckpt import load_weights
    from parallel_engine import Engine, unwrap
    from parallel_train.data.lerobot import LeRobotDataset
    from parallel_train.policies.factory import build_policy
    from parallel_train.policies.loading import load_policy
    from parallel_train.run.job import Job
    from parallel_train.run.signals import StopRequest
    from parallel_train.train import train

    config = config_of(replicate, shard, folder)
    with StopRequest() as stop:
        outcome = train(Job(config=config), stop)
    engine = Engine(parallelism=config.parallelism, accelerator=config.accelerator, device="cpu")
    whole = load_policy(folder)
    policy: Any = build_policy(config.policy, whole.spec)
    model = engine.prepare(policy, torch.optim.SGD(policy.parameters()), None, None)[0]
    load_weights(model, f"{folder}/checkpoints/last/pretrained_model")
    inner = unwrap(model).eval()
    sharded = all(isinstance(p, DTensor) for p in inner.parameters())
    dataset = LeRobotDataset(VIDEO, cameras=[TOP])
    batch = whole.preprocessor(dataset.__getitems__([3, 40]))
    acted = []
    for one in (whole.model, inner):
        torch.manual_seed(7)
        one.reset()
        acted.append(torch.stack([one.select_action(batch), one.select_action(batch)]))
    torch.manual_seed(7)
    future = inner.predict_future(batch)
    return {
        "step": outcome.step,
        "kind": engine.topology.kind.value,
        "sharded": sharded,
        "difference": float((acted[0] - acted[1]).abs().max()),
        "size": float(acted[0].abs().max()),
        "pictures": list(future.pictures.shape),
    }


def held_out_loss(replicate: int, shard: int, batch_size: int, seed: int) -> dict[str, float]:
    """Of weights that the seed does not change, twice; and that of the training mode's noise."""
    import dataclasses

    import torch
    from torch import nn

    from parallel_engine import Engine, evaluate_loss
    from parallel_train.data.split import EvalConfig
    from parallel_train.run.task import build_task

    config = dataclasses.replace(
        config_of(replicate, shard, "unused"),
        batch_size=batch_size,
        eval=EvalConfig(episodes=(1,), max_samples=13),
    )
    engine = Engine(parallelism=config.parallelism, accelerator=config.accelerator, device="cpu")
    task = build_task(config, engine.topology, engine.rank, samples_seen=0, device=engine.device)
    generator = torch.Generator().manual_seed(1)
    for parameter in task.model.parameters():  # some begin at 0, and would hide the flow time
        nn.init.normal_(parameter, std=0.1, generator=generator)
    optimizer = task.build_optimizer(task.model)
    model = engine.prepare(task.model, optimizer, None, None)[0]
    held_out = task.held_out
    assert held_out is not None
    found = []
    for count in range(2):
        torch.manual_seed(seed + count)
        report = evaluate_loss(
            *(engine, model, held_out.loader, task.loss_fn),
            num_counted=held_out.num_counted,
            seed=seed + count,
        )
        found.append({"loss": report.loss, **report.metrics})
    assert found[0] == found[1]
    return found[0]


def test_the_held_out_loss_is_the_same_on_any_number_of_ranks_and_repeats() -> None:
    """Whatever the size of the batches and the seed; the noise is the sample's."""
    (alone,) = run_ranks(held_out_loss, 1, 1, 1, 4, 0, timeout_s=120)
    assert alone.keys() == {"loss", "action_loss", "world_loss", "pictures_loss"}
    for world, replicate, shard, batch_size, seed in ((2, 2, 1, 2, 3), (2, 1, 2, 4, 5)):
        found = run_ranks(held_out_loss, world, replicate, shard, batch_size, seed, timeout_s=120)
        for rank in found:
            assert rank == pytest.approx(alone, rel=1e-6)


def test_noise_of_samples_is_normal_and_belongs_to_the_sample() -> None:
    import torch

    from parallel_train.policies.noise import noise_of_samples, times_of_samples

    index = torch.arange(200)
    noise = noise_of_samples(index, {"a": torch.zeros(200, 30, 2), "b": torch.zeros(200, 5)})
    assert noise["a"].mean().abs() < 0.05
    assert noise["a"].std() == pytest.approx(1, abs=0.03)
    assert not torch.equal(noise["a"][3], noise["a"][4])
    alone = noise_of_samples(index[[7]], {"a": torch.zeros(1, 30, 2), "b": torch.zeros(1, 5)})
    assert torch.equal(alone["b"][0], noise["b"][7])
    times, order = times_of_samples(index).sort()
    assert times[0] >= 0
    assert times[-1] < 1
    assert times.diff().max() < 3 / 200  # no part of the flow is left out
    assert order[:5].tolist() != [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("kind", "replicate", "shard"), [("fsdp", 1, 4), ("hsdp", 2, 2)])
def test_it_trains_saves_and_acts_sharded(
    kind: str, replicate: int, shard: int, tmp_path: Path
) -> None:
    import json

    folder = tmp_path / "run"
    ranks = run_ranks(train_and_sample, 4, replicate, shard, str(folder), timeout_s=240)
    for rank in ranks:
        assert (rank["step"], rank["kind"], rank["sharded"]) == (12, kind, True)
        assert rank["difference"] < 1e-5 < rank["size"]
        assert rank["pictures"] == [2, 2, 1, 3, 32, 32]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["samples_seen"] == 12 * 8
    assert sum(row["loss"] for row in rows[-3:]) < 0.95 * sum(row["loss"] for row in rows[:3])
    assert "pictures_loss" in json.dumps(rows[0])
