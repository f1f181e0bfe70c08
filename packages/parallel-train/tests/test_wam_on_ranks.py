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
    from parallel_train.signals import StopRequest
    from parallel_train.train import Job, train

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
