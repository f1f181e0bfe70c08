"""`ptrain verify`: every file of a checkpoint against its manifest; one process, no torch."""

from __future__ import annotations

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_config import ReportedError
from parallel_train.cli.commands import VerifyCommand
from parallel_train.cli.exits import DONE, FAILED, fail
from parallel_train.cli.parsing import Parsed


def run(parsed: Parsed) -> int:
    """Print the report. Returns 0 for an intact checkpoint, 1 for damage, 2 for wrong input."""
    from parallel_ckpt.verify import verify

    command: VerifyCommand = parsed.command
    try:
        report = verify(command.path, fast=command.fast)
    except DamagedCheckpoint as error:
        fail(error, "ptrain verify")
        # A manifest that is damaged is damage too: exit code 1, as for any other file.
        return FAILED
    except ReportedError as error:
        return fail(error, "ptrain verify")
    print(report.render())
    return DONE if report.ok else FAILED
