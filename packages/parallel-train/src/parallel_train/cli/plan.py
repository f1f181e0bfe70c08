"""`ptrain plan`: units, bytes per rank and communication of a run, without starting it."""

from __future__ import annotations

import sys

from parallel_config import ConfigError, Problem, ReportedError
from parallel_train.cli.commands import PlanCommand
from parallel_train.cli.exits import DONE, WRONG_INPUT, fail
from parallel_train.cli.parsing import Parsed
from parallel_train.config import TrainConfig

MAX_RANKS = 2**17
"""More than any cluster has; torch's tables of ranks grow with it, up to seconds here."""


def run(parsed: Parsed) -> int:
    """Print the plan. Returns 0, or 2 for wrong input."""
    from parallel_engine.plan import plan
    from parallel_train.data.fetch import located
    from parallel_train.data.metadata import read_metadata
    from parallel_train.policies.factory import build_policy

    command: PlanCommand = parsed.command
    config = command.run
    if not 1 <= command.world_size <= MAX_RANKS:
        message = f"= {command.world_size:,}, but it must be from 1 to {MAX_RANKS:,}."
        return fail(
            ConfigError(Problem("world_size", message, "Use --world_size 64.")), "ptrain plan"
        )
    try:
        # Only `meta` is read: a plan needs shapes and no frames.
        dataset = located(config.dataset)
        spec = read_metadata(dataset.folder, dataset.rename).policy_spec
        found = plan(
            lambda: build_policy(config.policy, spec),
            config.parallelism,
            config.accelerator,
            command.world_size,
            batch_size=config.batch_size,
            states_per_param=_states_per_param(config),
        )
    except (ReportedError, ValueError) as error:
        if isinstance(error, ReportedError):
            return fail(error, "ptrain plan")
        print(f"ptrain plan: {error}", file=sys.stderr)
        return WRONG_INPUT
    print(found.to_json() if command.json else found.render())
    return DONE


def _states_per_param(config: TrainConfig) -> int:
    """Moments of the optimizer, and the average of the weights."""
    # torch's SGD keeps a buffer only with momentum; Adam and AdamW keep two.
    has_momentum = config.optimizer.betas[0] > 0
    moments = int(has_momentum) if config.optimizer.type == "sgd" else 2
    return moments + (config.ema.decay is not None)
