"""The registry of policies; torch-free. Installed packages add theirs by entry point."""

from __future__ import annotations

from parallel_config.registry import Registry
from parallel_train.policies.base import PolicyConfig

POLICIES: Registry[PolicyConfig] = Registry(
    section="policy",
    base=PolicyConfig,
    builtin={
        "act": "parallel_train.policies.act.configuration:ACTConfig",
        "reward": "parallel_train.policies.reward.configuration:RewardConfig",
        "wam": "parallel_train.policies.wam.configuration:WAMConfig",
    },
    entry_point_group="parallel_train.policies",
)
