"""`ptrain train`: from a parsed command to a job, and from its outcome to an exit code."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from parallel_config import ConfigError, Problem, ReportedError, is_agreed
from parallel_config.environment import LaunchFacts, check_environment
from parallel_train.cli import flags as argv_flags
from parallel_train.cli.commands import ResumeCommand, TrainCommand
from parallel_train.cli.exits import (
    DONE,
    FAILED,
    NOT_PUBLISHED,
    PREEMPTED,
    code_of,
    end_at_once,
    fail,
    is_well,
)
from parallel_train.cli.parsing import Parsed
from parallel_train.config import SCHEMA
from parallel_train.run.job import Job
from parallel_train.run.shield import shielded
from parallel_train.run.signals import StopRequest, stop_without_launcher

if TYPE_CHECKING:
    from parallel_train.train import Outcome

ANNOUNCEMENT = "saving at the end of this update, then exiting; send it again to stop at once"


def run(parsed: Parsed) -> int:
    """Train. Returns the exit code; a rank of a group leaves the process itself."""
    return start(parsed, job_of)


def job_of(parsed: Parsed) -> Job:
    """The job of a `train` command."""
    command: TrainCommand = parsed.command
    return dataclasses.replace(common_job(parsed), resume=command.resume)


def common_job(parsed: Parsed) -> Job:
    """The part of a job that `train` and `resume` say with the same flags."""
    command: TrainCommand | ResumeCommand = parsed.command
    return Job(
        config=command.run,
        saved=parsed.saved,
        output_dir_given=argv_flags.is_given(parsed.argv, "output_dir"),
        parallelism_given=argv_flags.is_given(parsed.argv, "parallelism"),
        parallelism_in_file=parsed.is_in_file("parallelism"),
        accumulation_given=argv_flags.is_given(
            parsed.argv, "accelerator.gradient_accumulation.steps"
        ),
        stats_given=argv_flags.is_given(parsed.argv, "dataset.stats"),
        allow_batch_change=command.allow_batch_change,
        allow_optimizer_change=command.allow_optimizer_change,
        notes=parsed.notes,
    )


def start(parsed: Parsed, job: Callable[[Parsed], Job]) -> int:
    """Be a rank, or start ranks that read the same words: the way of `train` and of `resume`.

    Returns the exit code; a rank of a group leaves the process itself.
    """
    command: TrainCommand | ResumeCommand = parsed.command
    if command.print_config:
        # To stderr: stdout holds JSON alone.
        for line in parsed.notes:
            print(line, file=sys.stderr)
        print(SCHEMA.dump(command.run), end="")
        return DONE
    try:
        check_environment()
        facts = LaunchFacts.read()
    except ConfigError as error:
        return fail(error, f"ptrain {parsed.argv[0]}")
    nproc = command.launch.nproc_per_node
    with shielded():
        # Importing torch and opening data take their time: a person should see a sign at once.
        if facts.is_main and facts.launcher_fd is None:
            ranks = nproc or facts.world_size
            print(f"starting {_what(parsed)} on {ranks} rank(s)", flush=True)
        if nproc is None:
            return _work(parsed, facts, job)
        return _launch(parsed, facts, nproc)


def _what(parsed: Parsed) -> str:
    """What is trained, in words: `act to 400 updates`."""
    config = parsed.command.run
    return f"{parsed.command.policy_type} to {config.steps:,} updates"


def _launch(parsed: Parsed, facts: LaunchFacts, nproc: int) -> int:
    from parallel_train.cli.launcher import launch, without_flags

    if nproc < 1:
        return _refuse("--nproc_per_node", f"= {nproc}, but it must be at least 1.", "")
    if facts.is_launched:
        return _refuse(
            "--nproc_per_node",
            f"= {nproc}, but RANK = {facts.rank} is set: a launcher has started this process.",
            "Leave the flag out under torchrun or srun; unset a RANK that is left over from them.",
        )
    grace_s = parsed.command.launch.grace_s
    if not 0 <= grace_s < float("inf"):
        return _refuse(
            "--grace_s", f"= {grace_s}, but it must be a number of seconds from 0.", "Use 30."
        )
    # A rank that saw --nproc_per_node would launch again.
    argv = without_flags(parsed.argv, ("nproc_per_node", "grace_s"))
    return launch(argv, nproc_per_node=nproc, grace_s=grace_s)


def _refuse(path: str, message: str, remedy: str) -> int:
    return fail(ConfigError(Problem(path, message, remedy)), "ptrain")


def _work(parsed: Parsed, facts: LaunchFacts, job: Callable[[Parsed], Job]) -> int:
    """Be a rank. Its exit code; one of several leaves the process here."""
    # Before torch is imported: a signal during the start is a request like any other.
    # Once per run: the launcher announces for its ranks, else the main rank does.
    announce = "" if facts.launcher_fd is not None or not facts.is_main else ANNOUNCEMENT
    with StopRequest(announce=announce, on_second=end_at_once) as stop:
        if facts.launcher_fd is not None:
            stop_without_launcher(facts.launcher_fd)
        code = _train(parsed, facts, job, stop)
        if facts.world_size > 1:
            from parallel_engine import leave

            # A rank that failed must not wait for its peers, who may be in a collective.
            leave(code, together=is_well(code))
    return code


def _train(
    parsed: Parsed, facts: LaunchFacts, job: Callable[[Parsed], Job], stop: StopRequest
) -> int:
    # Here and not above: the launcher, --print_config and errors of flags need no torch.
    from parallel_engine import NonFiniteError, PeerError, UnusedParametersError, connect
    from parallel_train.data.worker_deaths import WorkerDeath
    from parallel_train.train import train

    try:
        seconds = argv_flags.seconds("timeout_s", parsed.command.launch.timeout_s)
        connected = connect(timeout=timedelta(seconds=seconds))
        return _finish(train(job(parsed), stop, connected), facts, stop)
    except ReportedError as error:
        # Agreed errors are the main rank's to print; any other is this rank's own.
        if facts.is_main or not is_agreed(error):
            fail(error, f"ptrain {parsed.argv[0]}")
        return code_of(error)
    except (NonFiniteError, UnusedParametersError) as error:  # the same on every rank
        if facts.is_main:
            fail(error, f"ptrain {parsed.argv[0]}")
    except WorkerDeath as error:  # this rank's own
        fail(error, f"ptrain {parsed.argv[0]}: rank {facts.rank}")
    except PeerError as error:
        print(f"ptrain: rank {facts.rank} leaves: {error}", file=sys.stderr)
    except Exception:
        # The group may be broken: say why and leave without a collective.
        traceback.print_exc()
    return FAILED


def _finish(outcome: Outcome, facts: LaunchFacts, stop: StopRequest) -> int:
    """Exit code of a run that ended well; what it publishes is sent once the ranks have parted."""
    code = PREEMPTED if outcome.preempted else DONE
    if outcome.publisher is None:
        return code
    from parallel_engine import part

    part()
    # The ranks have parted: no collective waits for the network.
    if not facts.is_main or outcome.publisher.finish(stop.is_asked):
        return code
    return code or NOT_PUBLISHED  # a scheduler must still see that the run is to be started again
