"""One global batch gives the same numbers on every kind, through the command line."""

import json
import os

DOUBLE = '''
"""ACT computed in float64, where rounding cannot hide a wrong update."""

from dataclasses import dataclass
from typing import ClassVar

from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.act.modeling import ACTPolicy


@dataclass(frozen=True, kw_only=True)
class Config(ACTConfig):
    model_class: ClassVar[str] = "float64_act:Policy"


class Policy(ACTPolicy):
    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.double()

    def forward(self, batch):
        return super().forward(
            {name: v.double() if v.is_floating_point() else v for name, v in batch.items()}
        )
'''
TINY = [
    "--policy.dim_model", 16, "--policy.n_heads", 2, "--policy.dim_feedforward", 32,
    "--policy.chunk_size", 4, "--policy.n_encoder_layers", 1, "--policy.n_decoder_layers", 1,
    "--policy.dropout", 0, "--policy.no-use_vae",
]  # fmt: skip
ACCUMULATE = "--accelerator.gradient_accumulation.steps"
VARIANTS = {
    "accumulated": (1, ["--batch_size", 2, ACCUMULATE, 4]),
    "ddp": (2, ["--batch_size", 4]),
    "fsdp": (4, ["--batch_size", 2, "--parallelism.dp_shard", -1]),
    "hsdp": (
        4,
        ["--batch_size", 1, ACCUMULATE, 2, "--parallelism.dp_replicate", 2,
         "--parallelism.dp_shard", 2],
    ),
}  # fmt: skip


UPDATES = 100 if os.environ.get("PARALLEL_LONG") else 20
"""A hundred in `nox -s long`: four ranks on two cores take a second per update."""


def test_float64_agrees_for_many_updates(ptrain, small, same_numbers):
    (ptrain.folder / "float64_act.py").write_text(DOUBLE)
    path = [str(ptrain.folder), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    flags = ["--policy.type", "float64_act:Config", *small, *TINY, "--steps", UPDATES]
    flags += ["--checkpoint.save_freq", 0, "--scheduler.warmup_steps", 5]
    ptrain("train", *flags, "--output_dir", "one", env=env)
    rows = ptrain.rows("one")
    assert len(rows) == UPDATES
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    for name, (ranks, more) in VARIANTS.items():
        launch = ["--nproc_per_node", ranks] if ranks > 1 else []
        ptrain("train", *flags, *more, "--output_dir", name, *launch, env=env)
        found = ptrain.rows(name)
        same_numbers(found, rows, rel=1e-9)
        info = json.loads(ptrain("inspect", f"{name}/checkpoints/last", "--json"))
        assert info["kind"] == ("single" if ranks == 1 else name)


def test_an_environment_that_may_win_is_counted_and_recorded(ptrain, small):
    env = {
        "PARALLEL_ALLOW_ACCELERATE_ENV": "1",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    text = ptrain("train", *small, "--steps", 2, "--output_dir", "run", env=env)
    line = "accelerator.gradient_accumulation.steps: 1 -> 3"
    assert f"the environment wins: {line}" in text
    assert ptrain.rows("run")[-1]["samples_seen"] == 2 * 8 * 3
    manifest = json.loads((ptrain.folder / "run/checkpoints/last/manifest.json").read_text())
    recorded = json.dumps(manifest)
    assert line in recorded
    assert '"ACCELERATE_MIXED_PRECISION": "bf16"' in recorded
    config = json.loads((ptrain.folder / "run/train_config.json").read_text())
    assert config["accelerator"]["mixed_precision"] == "bf16"
    # Without the variables the saved config alone goes on alike.
    assert "(step 2)" in ptrain("resume", "run", "--steps", 3)
    assert ptrain.rows("run")[-1]["samples_seen"] == 3 * 8 * 3
