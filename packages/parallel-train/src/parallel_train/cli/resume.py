"""`ptrain resume`: the job of a run that is there already; it starts as `ptrain train` does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from parallel_train.cli.commands import ResumeCommand
from parallel_train.cli.parsing import Parsed
from parallel_train.cli.train import common_job, start
from parallel_train.run.job import Job


def run(parsed: Parsed) -> int:
    """Resume. Returns the exit code; a rank of a group leaves the process itself."""
    return start(parsed, job_of)


def job_of(parsed: Parsed) -> Job:
    """The job of a `resume` command."""
    command: ResumeCommand = parsed.command
    # Parsing has refused a command without a path, after --from_hub had put its own there.
    return dataclasses.replace(
        common_job(parsed), resume="must", checkpoint=Path(str(command.path))
    )
