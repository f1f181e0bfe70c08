"""`ptrain report`: a picture of a run."""

from __future__ import annotations

import importlib.util
import sys

from parallel_config import ConfigError
from parallel_train.cli.commands import ReportCommand
from parallel_train.cli.exits import DONE, WRONG_INPUT, fail
from parallel_train.cli.parsing import Parsed


def run(parsed: Parsed) -> int:
    """Draw and print where. Returns 0, or 2 for wrong input."""
    command: ReportCommand = parsed.command
    if importlib.util.find_spec("matplotlib") is None:
        print('ptrain report needs pip install "parallel-train[plot]"', file=sys.stderr)
        return WRONG_INPUT
    from parallel_train.metrics.report import draw_report

    try:
        print(draw_report(command.path, command.output))
    except ConfigError as error:
        return fail(error, "ptrain report")
    return DONE
