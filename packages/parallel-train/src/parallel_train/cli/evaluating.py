"""`ptrain evaluate`: success rates of a trained policy in simulation."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

from parallel_config import ConfigError
from parallel_train.cli.app import USAGE_ERROR, fail
from parallel_train.cli.commands import EvaluateCommand
from parallel_train.cli.parsing import Parsed


def run(parsed: Parsed) -> int:
    """Print a line per task and controller. Returns 0, or 2 for wrong input."""
    command: EvaluateCommand = parsed.command
    if importlib.util.find_spec("metaworld") is None:
        print('ptrain evaluate needs MetaWorld: pip install "parallel-train[sim]"', file=sys.stderr)
        return USAGE_ERROR
    from parallel_train.evaluate import SuccessRate, evaluate_policy
    from parallel_train.policies.loading import load_policy

    def show(result: SuccessRate) -> None:
        if not command.json:
            print(result, flush=True)

    try:
        loaded = load_policy(command.path)
        results = evaluate_policy(
            loaded.model,
            loaded.preprocessor,
            loaded.spec,
            list(command.tasks),
            episodes=command.episodes,
            seed=command.seed,
            max_steps=command.max_steps,
            on_result=show,
        )
    except ConfigError as error:
        return fail(error, "ptrain evaluate")
    if command.json:
        print(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    return 0
