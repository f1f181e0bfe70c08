"""`ptrain inspect`: what a checkpoint or a run holds; one process, mostly without torch."""

from __future__ import annotations

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_config import ReportedError
from parallel_train.cli.commands import InspectCommand
from parallel_train.cli.exits import DONE, FAILED, fail
from parallel_train.cli.parsing import Parsed


def run(parsed: Parsed) -> int:
    """Print it. Returns 0, 1 for damage, or 2 for wrong input."""
    from parallel_ckpt.inspect import inspect

    command: InspectCommand = parsed.command
    try:
        info = inspect(command.path)
    except DamagedCheckpoint as error:
        fail(error, "ptrain inspect")
        # Damage is not wrong input: scripts tell the two apart by the code.
        return FAILED
    except ReportedError as error:
        return fail(error, "ptrain inspect")
    print(info.to_json() if command.json else info.render())
    return DONE
