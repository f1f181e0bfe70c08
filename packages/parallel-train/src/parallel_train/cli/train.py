"""`train` and `resume`: from a parsed command to a job, and from its outcome to an exit code."""

from __future__ import annotations

import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_config import ConfigError, Problem, ReportedError, is_agreed
from parallel_config.environment import LaunchFacts, check_environment
from parallel_train.cli import flags as argv_flags
from parallel_train.cli.app import USAGE_ERROR, fail
from parallel_train.cli.commands import ResumeCommand, TrainCommand
from parallel_train.cli.parsing import Parsed
from parallel_train.config import SCHEMA
from parallel_train.run.signals import (
    NOT_PUBLISHED,
    PREEMPTED,
    StopRequest,
    stop_without_launcher,
)

if TYPE_CHECKING:
    from parallel_train.train import Job, Outcome

ANNOUNCEMENT = "saving at the end of this update, then leaving; send it again to stop at once"


def run(parsed: Parsed) -> int:
    """Train or resume. Returns the exit code; a rank of a group leaves the process itself."""
    command: TrainCommand | ResumeCommand = parsed.command
    if command.print_config:
        for line in parsed.notes:
            print(line, file=sys.stderr)
        print(SCHEMA.dump(command.run), end="")
        return 0
    try:
        check_environment()
        facts = LaunchFacts.read()
    except ConfigError as error:
        return fail(error, f"ptrain {parsed.argv[0]}")
    nproc = command.launch.nproc_per_node
    if nproc is None:
        return _work(parsed, facts)
    return _launch(parsed, facts, nproc)


def _launch(parsed: Parsed, facts: LaunchFacts, nproc: int) -> int:
    from parallel_train.cli.launcher import launch, without_flags

    if nproc < 1:
        return _refuse("--nproc_per_node", f"= {nproc}, but it is at least 1.", "")
    if facts.is_launched:
        return _refuse(
            "--nproc_per_node",
            f"= {nproc}, but RANK = {facts.rank} is set: a launcher has started this process.",
            "Leave the flag out under torchrun or srun; a RANK left over from them must be unset.",
        )
    grace_s = parsed.command.launch.grace_s
    if not 0 <= grace_s < float("inf"):
        return _refuse("--grace_s", f"= {grace_s}, but it is a number of seconds.", "Use 30.")
    argv = without_flags(parsed.argv, ("nproc_per_node", "grace_s"))
    return launch(argv, nproc_per_node=nproc, grace_s=grace_s)


def _refuse(path: str, message: str, remedy: str) -> int:
    return fail(ConfigError(Problem(path, message, remedy)), "ptrain")


def _work(parsed: Parsed, facts: LaunchFacts) -> int:
    """Be a rank. Its exit code; one of several leaves the process here."""
    # Before torch is imported: a signal during the start is a request like any other.
    announce = "" if facts.launcher_fd is not None or not facts.is_main else ANNOUNCEMENT
    with StopRequest(announce=announce) as stop:
        if facts.launcher_fd is not None:
            stop_without_launcher(facts.launcher_fd)
        code = _train(parsed, facts, stop)
        if facts.world_size > 1:
            from parallel_engine import leave

            leave(code, together=code in (0, PREEMPTED))
    return code


def _train(parsed: Parsed, facts: LaunchFacts, stop: StopRequest) -> int:
    from parallel_engine import NonFiniteError, PeerError, UnusedParametersError, connect
    from parallel_train.train import train

    try:
        seconds = argv_flags.seconds("timeout_s", parsed.command.launch.timeout_s)
        connect(timeout=timedelta(seconds=seconds))
        return _finish(train(_job(parsed), stop), facts, stop)
    except ReportedError as error:
        # Agreed errors are the main rank's to print; any other is this rank's own.
        if facts.is_main or not is_agreed(error):
            fail(error, f"ptrain {parsed.argv[0]}")
        return USAGE_ERROR
    except (NonFiniteError, UnusedParametersError) as error:  # the same on every rank
        if facts.is_main:
            fail(error, f"ptrain {parsed.argv[0]}")
    except PeerError as error:
        print(f"ptrain: rank {facts.rank} leaves: {error}", file=sys.stderr)
    except Exception:
        # The group may be broken: say why and leave without a collective.
        traceback.print_exc()
    return 1


def _finish(outcome: Outcome, facts: LaunchFacts, stop: StopRequest) -> int:
    """Exit code of a run that ended well; what it publishes is sent once the ranks have parted."""
    if outcome.publisher is None:
        return outcome.exit_code
    from parallel_engine import part

    part()
    if not facts.is_main or outcome.publisher.finish(stop.is_asked):
        return outcome.exit_code
    return outcome.exit_code or NOT_PUBLISHED


def _job(parsed: Parsed) -> Job:
    from parallel_train.train import Job

    command = parsed.command
    resume = isinstance(command, ResumeCommand)
    return Job(
        config=command.run,
        resume="must" if resume else command.resume,
        checkpoint=Path(command.path) if resume else None,
        output_dir_given=argv_flags.is_given(parsed.argv, "output_dir"),
        parallelism_given=argv_flags.is_given(parsed.argv, "parallelism"),
        parallelism_in_file=parsed.is_in_file("parallelism"),
        accumulation_given=argv_flags.is_given(
            parsed.argv, "accelerator.gradient_accumulation.steps"
        ),
        stats_given=argv_flags.is_given(parsed.argv, "dataset.stats"),
        allow_batch_change=command.allow_batch_change,
        notes=parsed.notes,
    )
