"""Every exit code of `ptrain`, and how an error becomes one."""

from __future__ import annotations

import os
import signal
import sys

from parallel_config import ReportedError

DONE = 0
FAILED = 1
"""The run failed, a checkpoint is damaged, or this machine cannot train."""
WRONG_INPUT = 2
"""A flag, a file or a combination of them is wrong; the same code as tyro's own."""
NOT_PUBLISHED = 3
"""What was made is whole and kept here, but it is not on the Hub."""
PREEMPTED = 75
"""The run was asked to stop, saved and left (EX_TEMPFAIL of sysexits.h: try again)."""


def by_signal(number: int) -> int:
    """The code by which a shell reports a process that died of the signal."""
    return 128 + number


INTERRUPTED = by_signal(signal.SIGINT)
"""Ctrl-C ended a command that does not save: 130."""


def end_at_once(number: int) -> None:
    """Leave the process as if the signal had killed it.

    Checkpoints are committed by rename, so that ending at any moment damages none.
    """
    # Without cleanup, which may wait for a peer or for the network.
    os._exit(by_signal(number))


def fail(error: Exception, where: str) -> int:
    """Print the error as one block and give the exit code of wrong input."""
    text = str(error)
    # A block of several problems has a heading of its own.
    print(f"{where.strip()}: error\n" if "\n" not in text else "", end="", file=sys.stderr)
    print(text, file=sys.stderr)
    return WRONG_INPUT


def code_of(error: ReportedError) -> int:
    """The exit code of a run that ended by this error: wrong input, unless its class says else."""
    from parallel_ckpt.errors import RankLost

    # What was given is right, so a scheduler may start the run again.
    return FAILED if isinstance(error, RankLost) else WRONG_INPUT


def is_well(code: int) -> bool:
    """Whether a run ended as it should: finished, or stopped on request after a save."""
    return code in (DONE, PREEMPTED)
