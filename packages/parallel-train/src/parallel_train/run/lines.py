"""The lines that a run prints at its start and at its end."""

from __future__ import annotations

import shlex

from parallel_train.policies.registry import POLICIES
from parallel_train.run.start import DecidedJob


def headline(job: DecidedJob, num_parameters: int) -> str:
    """The line before the first update."""
    return (
        f"training {num_parameters:,} parameters on {job.topology.describe()}, "
        f"into {job.files.path}"
    )


def stopped_before(step: int, steps: int) -> str:
    """The line of a run that was asked to stop before its first update."""
    return f"stopped on request before the first update: step {step} of {steps}"


def summary(job: DecidedJob, begun: int, done: int, seconds: float) -> str:
    """How the run ended, and the commands that look at it and go on with it.

    `begun` and `done` are the updates before and after this start.
    """
    files, steps = job.files, job.config.steps
    # Nothing was trained, so there is no checkpoint of this start to name.
    if done == begun:
        return stopped_before(done, steps)
    state = "finished" if done >= steps else "stopped on request, checkpoint written"
    # A finished run goes on only with more steps.
    goal = steps if done < steps else 2 * steps
    name = POLICIES.name_of(job.config.policy)
    # A class named by path is taken from a checkpoint only when the user names it too.
    repeated = f" --policy.type {name}" if ":" in name else ""
    return "\n".join(
        [
            f"{state}: step {done} of {steps} after {seconds:.0f} s",
            f"  look:    ptrain inspect {shlex.quote(str(files.last))}",
            f"  go on:   ptrain resume {shlex.quote(str(files.path))}{repeated} --steps {goal}",
            f"  numbers: {files.metrics}",
        ]
    )
