"""Every policy trains under every kind, through the engine, on real gloo ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from parallel_testing.ranks import rank_outcomes, run_ranks

KINDS = {"ddp": (2, 1), "fsdp": (1, 2), "hsdp": (2, 2)}
STEPS = 4


def config_of(name: str) -> Any:
    from parallel_train.policies.act.configuration import ACTConfig
    from parallel_train.policies.reward.configuration import RewardConfig
    from parallel_train.policies.wam.configuration import WAMConfig

    if name == "act":
        return ACTConfig(dim_model=32, dim_feedforward=64, chunk_size=8, dropout=0, use_vae=False)
    if name == "reward":
        return RewardConfig(dim_model=32, dropout=0)
    return WAMConfig(width=32, action_width=16, n_heads=2, head_dim=16, n_layers=2, chunk_size=8)


def train(name: str, replicate: int, shard: int) -> dict[str, Any]:
    """Losses of a few updates with a global batch of 16, and what became of the parameters."""
    import torch
    from torch.distributed.tensor import DTensor

    from parallel_config import AcceleratorConfig, GradientAccumulationConfig, ParallelismConfig
    from parallel_engine import Engine, Loss, unwrap
    from parallel_train.data.config import DatasetConfig
    from parallel_train.data.lerobot import LeRobotDataset
    from parallel_train.data.loader import build_loader
    from parallel_train.data.order import GlobalBatchSampler
    from parallel_train.policies.factory import build_policy
    from parallel_train.policies.processors import Preprocessor

    engine = Engine(
        parallelism=ParallelismConfig(dp_replicate=replicate, dp_shard=shard),
        accelerator=AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(steps=2)),
        device="cpu",
    )
    config = config_of(name)
    dataset = LeRobotDataset.from_config(DatasetConfig(), config)
    preprocessor = Preprocessor.from_stats(dataset.stats, config.normalization())
    torch.manual_seed(0)
    policy = build_policy(config, dataset.spec)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    ranks = replicate * shard
    sampler = GlobalBatchSampler(
        len(dataset), 8 // ranks, 2, engine.topology.dp_rank(engine.rank), ranks, seed=1
    )
    model, optimizer, _, loader = engine.prepare(
        policy, optimizer, None, build_loader(dataset, sampler)
    )

    def loss_fn(model: Any, batch: Any) -> Any:
        batch = preprocessor(batch)
        loss = model(batch)[0]
        weigh = getattr(unwrap(model), "loss_weight", None)
        weight = torch.tensor(float(len(batch["index"]))) if weigh is None else weigh(batch)
        return Loss(loss * weight, weight.float())

    windows = iter(engine.accumulate(loader))
    reports = [
        engine.step(model, optimizer, None, next(windows), loss_fn, clip_norm=1.0)
        for _ in range(STEPS)
    ]
    parameters = list(unwrap(model).parameters())
    return {
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "sharded": sum(isinstance(p, DTensor) for p in parameters) / len(parameters),
        "chunk": entry_point(name, model, dataset, preprocessor),
    }


def entry_point(name: str, model: Any, dataset: Any, preprocessor: Any) -> list[float]:
    """What a declared method answers on the wrapped model, the same on every rank."""
    import torch

    from parallel_engine import unwrap

    inner = unwrap(model).eval()
    batch = preprocessor(dataset.__getitems__([5, 900]))
    torch.manual_seed(3)
    method = "predict_success" if name == "reward" else "predict_action_chunk"
    with torch.no_grad():
        return getattr(inner, method)(batch).flatten().tolist()


def train_all(replicate: int, shard: int) -> dict[str, dict[str, Any]]:
    """By policy; one after another in the same processes, each with an engine of its own."""
    return {name: train(name, replicate, shard) for name in ("act", "reward", "wam")}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """The same runs in one process."""
    (result,) = run_ranks(train_all, 1, 1, 1, init=False)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_policies_train_under_every_kind(kind: str, alone: dict[str, dict[str, Any]]) -> None:
    replicate, shard = KINDS[kind]
    ranks = run_ranks(train_all, replicate * shard, replicate, shard)
    for name, single in alone.items():
        results = [rank[name] for rank in ranks]
        first = results[0]
        for result in results:
            assert result["sharded"] == (1.0 if shard > 1 else 0.0)
            assert result["losses"] == first["losses"]
            assert result["chunk"] == pytest.approx(first["chunk"], abs=1e-6)
        assert single["sharded"] == 0.0
        if name == "wam":  # its noise is each rank's own, so that losses differ from one process's
            assert all(0 < loss < 10 for loss in first["losses"])
            continue
        assert first["losses"] == pytest.approx(single["losses"], abs=1e-5)
        assert first["norms"] == pytest.approx(single["norms"], rel=1e-4)
        assert first["chunk"] == pytest.approx(single["chunk"], abs=1e-4)


def train_on_two_nodes(folder: Path) -> None:
    """Each rank in a folder of its own; only the first holds the dataset."""
    from parallel_train.config import TrainConfig
    from parallel_train.data.config import DatasetConfig
    from parallel_train.run.job import Job
    from parallel_train.run.signals import StopRequest
    from parallel_train.train import train as train_job

    os.chdir(folder / os.environ["RANK"])
    dataset = DatasetConfig(root="dataset")
    config = TrainConfig(
        policy=config_of("act"), dataset=dataset, output_dir=str(folder / "run"), steps=1
    )
    with StopRequest() as stop:
        train_job(Job(config=config), stop)


def test_a_dataset_that_one_node_lacks_is_an_error_on_every_rank(tmp_path: Path) -> None:
    from parallel_train.data.config import EMBEDDED_ROOT

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0/dataset").symlink_to(EMBEDDED_ROOT)
    for outcome in rank_outcomes(train_on_two_nodes, 2, tmp_path, init=False):
        assert outcome.error_type == "ConfigError"
        missing = f"dataset.root = '{tmp_path}/1/dataset': this folder does not exist"
        assert missing in outcome.error


def train_although_a_sink_is_full(folder: Path) -> list[str]:
    """What the main rank prints goes to a full disk, from the first row on."""
    from parallel_config import CheckpointConfig
    from parallel_train import train
    from parallel_train.config import TrainConfig
    from parallel_train.metrics.sinks import LineSink, Row, Sinks
    from parallel_train.run.signals import StopRequest

    class Full(LineSink):
        def emit(self, row: Row) -> None:
            raise OSError(28, "No space left on device")

    # The main rank alone calls it.
    train.open_sinks = lambda *given: Sinks([Full(steps=4, log_freq=1)])
    config = TrainConfig(
        policy=config_of("act"),
        output_dir=str(folder / "run"),
        steps=4,
        checkpoint=CheckpointConfig(save_freq=1),
    )
    with StopRequest() as stop:
        train.train(train.Job(config=config), stop)
    return sorted(path.name for path in (folder / "run/checkpoints").glob("0*"))


def test_a_sink_that_fails_on_the_main_rank_ends_no_rank(tmp_path: Path) -> None:
    for outcome in rank_outcomes(train_although_a_sink_is_full, 2, tmp_path, init=False):
        assert not outcome.error
        assert outcome.result == ["000001", "000002", "000003", "000004"]
