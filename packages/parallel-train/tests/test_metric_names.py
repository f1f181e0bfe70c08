"""Metrics of a policy in a run: never in place of its own numbers, and there when they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel_testing.programs import run_ptrain

POLICY = '''
from dataclasses import dataclass

from torch import nn

from parallel_train.policies.base import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class TalkingConfig(PolicyConfig):
    """Of no field."""


class Talking(nn.Module):
    config_class = TalkingConfig
    _fsdp_wrap_modules = ("Linear",)

    def __init__(self, config, spec):
        super().__init__()
        self.layer = nn.Linear(spec.dim("observation.state"), spec.dim("action"))

    def forward(self, batch):
        loss = (self.layer(batch["observation.state"]) - batch["action"]).square().mean()
        metrics = {"loss": -1.0, "step": -2.0, "eval_loss": -3.0, "skipped": -4.0}
        for index in batch["index"].tolist():
            metrics[f"of_{index % 3}"] = float(index % 3)
        return loss, metrics
'''
STEPS = 4


def trained(folder: Path, world: int) -> list[dict[str, Any]]:
    """Rows of a run on `world` ranks with the same global batch."""
    (folder / "talking.py").write_text(POLICY)
    words = ["train", "--policy.type", "talking:Talking", "--output_dir", f"{world}"]
    words += ["--dataset.episodes", "0", "--eval.episodes", "1", "--eval.max_samples", "2"]
    words += ["--steps", f"{STEPS}", "--batch_size", f"{2 // world}"]
    words += ["--nproc_per_node", "2", "--parallelism.dp_shard", "2"] if world > 1 else []
    run_ptrain(*words, cwd=folder, env={"PYTHONPATH": "."}, timeout_s=180)
    lines = (folder / f"{world}/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_metrics_keep_to_their_names_and_ranks_may_differ(tmp_path: Path) -> None:
    runs = trained(tmp_path, 1), trained(tmp_path, 2)
    for number, (one, two) in enumerate(zip(*runs, strict=True), start=1):
        assert one["step"] == two["step"] == number
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["loss"] > 0
        for row in (one, two):
            assert (row["policy_loss"], row["policy_step"]) == (-1.0, -2.0)
            assert (row["policy_eval_loss"], row["policy_skipped"]) == (-3.0, -4.0)
            assert "skipped" not in row
        found = {name: value for name, value in two.items() if name.startswith("of_")}
        assert found == {name: value for name, value in one.items() if name.startswith("of_")}
        assert all(value == float(name[-1]) for name, value in found.items())
    assert len({tuple(sorted(row)) for row in runs[1]}) > 1  # names do come and go
    one, two = (run[-1] for run in runs)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    assert two["eval_loss"] > 0
    assert (two["eval_policy_loss"], two["eval_of_0"], two["eval_of_2"]) == (-1.0, 0.0, 2.0)
