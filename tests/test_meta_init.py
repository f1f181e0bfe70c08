"""`--meta_init`: the same numbers without a rank that holds the whole model."""

import sys

SHARDED = ["--nproc_per_node", 2, "--parallelism.dp_shard", 2, "--batch_size", 4]


def test_a_run_is_the_same_with_values_drawn_into_shards(ptrain, small, same_numbers):
    flags = [*small, *SHARDED, "--steps", 4, "--checkpoint.save_freq", 2]
    ptrain("train", *flags, "--output_dir", "whole")
    text = ptrain("train", *flags, "--meta_init", "--output_dir", "meta")
    assert "on fsdp, " in text
    same_numbers(ptrain.rows("meta"), ptrain.rows("whole"))
    ptrain("resume", "meta/checkpoints/000002", "--nproc_per_node", 2)
    same_numbers(ptrain.rows("meta"), ptrain.rows("whole"))


POLICY = """
import torch
from dataclasses import dataclass
from torch import nn
from parallel_train.policies.base import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class MyConfig(PolicyConfig):
    model_class = "drawn:MyPolicy"


class MyPolicy(nn.Module):
    config_class = MyConfig

    def __init__(self, config, spec):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4))

    def forward(self, batch):
        loss = self.table.square().sum()
        return loss, {}
"""


def test_a_policy_that_draws_its_values_elsewhere_says_what_to_do(ptrain):
    (ptrain.folder / "drawn.py").write_text(POLICY)
    flags = ["--policy.type", "drawn:MyPolicy", "--steps", 1, "--meta_init"]
    environ = {"PYTHONPATH": ":".join([str(ptrain.folder), *filter(None, sys.path)])}
    text = ptrain("train", *flags, code=2, env=environ)
    assert text.endswith(
        "meta_init = True, but MyPolicy was built on the meta device, and nothing gave values to "
        "table. Give its modules a reset_parameters() that draws them, or use --no-meta_init.\n"
    ), text
    drawing = "    def reset_parameters(self):\n        raise RuntimeError('no\\nway')\n"
    (ptrain.folder / "drawn.py").write_text(POLICY + drawing)
    text = ptrain("train", *flags, code=2, env=environ)
    assert text.endswith(
        "meta_init = True, but drawing the values of MyPolicy fails: no. "
        "Correct the module's reset_parameters(), or use --no-meta_init.\n"
    ), text
    fetching = "    def reset_parameters(self):\n        nn.init.ones_(self.table)\n\n"
    fetching += "    def load_pretrained(self):\n        self.load_state_dict({})\n"
    (ptrain.folder / "drawn.py").write_text(POLICY + fetching)
    text = ptrain("train", *flags, code=2, env=environ)
    assert text.endswith(
        "meta_init = True, but MyPolicy cannot read its pretrained weights into shards: "
        "Error(s) in loading state_dict for MyPolicy. Use --no-meta_init.\n"
    ), text
    (ptrain.folder / "drawn.py").write_text(POLICY)
    ptrain("train", *flags[:-1], "--output_dir", "run", env=environ)
