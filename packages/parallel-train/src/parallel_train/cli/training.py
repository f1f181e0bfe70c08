"""`train` and `resume`: from a parsed command to a job, and from its outcome to an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from parallel_config import ConfigError
from parallel_config.environment import LaunchFacts, check_environment
from parallel_train.cli import flags as argv_flags
from parallel_train.cli.app import USAGE_ERROR, fail
from parallel_train.cli.commands import ResumeCommand, TrainCommand
from parallel_train.cli.parsing import Parsed
from parallel_train.config import SCHEMA
from parallel_train.signals import PREEMPTED


def run(parsed: Parsed) -> int:
    """Train or resume. Returns the exit code; a rank of a group leaves the process itself."""
    command: TrainCommand | ResumeCommand = parsed.command
    if command.print_config:
        print(SCHEMA.dump(command.run), end="")
        return 0
    try:
        check_environment()
        facts = LaunchFacts.read()
    except ConfigError as error:
        return fail(error, f"ptrain {parsed.argv[0]}")
    nproc = command.launch.nproc_per_node
    if nproc is not None and "RANK" not in os.environ:
        return _launch(parsed, nproc)
    return _work(parsed, facts)


def _launch(parsed: Parsed, nproc: int) -> int:
    from parallel_train.launch import launch, without_flags

    if nproc < 1:
        print(f"--nproc_per_node = {nproc}, but it is at least 1.", file=sys.stderr)
        return 2
    argv = without_flags(parsed.argv, ("nproc_per_node", "grace_s"))
    return launch(argv, nproc_per_node=nproc, grace_s=parsed.command.launch.grace_s)


def _work(parsed: Parsed, facts: LaunchFacts) -> int:
    from parallel_engine import leave
    from parallel_train.launch import leave_exit_code
    from parallel_train.train import Job, train

    command = parsed.command
    resume = isinstance(command, ResumeCommand)
    job = Job(
        config=command.run,
        resume="must" if resume else command.resume,
        checkpoint=Path(command.path) if resume else None,
        parallelism_given=parsed.parallelism_given,
        accumulation_given=argv_flags.is_given(
            parsed.argv, "accelerator.gradient_accumulation.steps"
        ),
        allow_batch_change=command.allow_batch_change,
        notes=parsed.notes,
    )
    try:
        code = train(job).exit_code
    except ConfigError as error:
        code = fail(error, f"ptrain {parsed.argv[0]}") if facts.is_main else USAGE_ERROR
    except Exception:
        # The group may be broken: say why and leave without a collective.
        traceback.print_exc()
        code = 1
    leave_exit_code(code)
    if facts.world_size > 1:
        leave(code, together=code in (0, PREEMPTED))
    return code
