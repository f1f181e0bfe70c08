"""`ptrain`: parse, hand over to the command's module, turn errors into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Sequence

from parallel_config import ReportedError

# Modules are imported when their command is chosen: `ptrain --help` must not pay for torch.
RUNNERS = {
    "train": "parallel_train.cli.train",
    "resume": "parallel_train.cli.train",
    "plan": "parallel_train.cli.plan",
    "inspect": "parallel_train.cli.offline",
    "verify": "parallel_train.cli.offline",
    "convert": "parallel_train.cli.offline",
    "publish": "parallel_train.cli.publish",
    "evaluate": "parallel_train.cli.evaluate",
    "report": "parallel_train.cli.report",
    "doctor": "parallel_train.cli.doctor",
}
USAGE_ERROR = 2
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run `ptrain` and leave the process with its exit code."""
    try:
        code = run(sys.argv[1:] if argv is None else list(argv))
        _leave_requests(code)
        sys.exit(code)
    except KeyboardInterrupt:
        print("ptrain: stopped", file=sys.stderr)
        _leave_requests(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, `head` say, had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _leave_requests(code: int) -> None:
    """End here when a request to the Hub was left to itself: a plain exit would wait for it."""
    if any(thread.name.startswith("hub-") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command. Returns the exit code: 0 done, 2 wrong input, 75 preempted, 1 otherwise."""
    from parallel_train.cli.from_hub import fetched
    from parallel_train.cli.parsing import parse

    try:
        argv = fetched(argv)
        parsed = parse(list(argv) or ["--help"])
    except ReportedError as error:
        return fail(error, "ptrain " + " ".join(argv[:1]))
    module = importlib.import_module(RUNNERS[argv[0]])
    return int(module.run(parsed))


def fail(error: Exception, where: str) -> int:
    """Print the error as one block and give the exit code of wrong input."""
    text = str(error)
    print(f"{where.strip()}: error\n" if "\n" not in text else "", end="", file=sys.stderr)
    print(text, file=sys.stderr)
    return USAGE_ERROR
