"""`ptrain`: parse, hand over to the command's module, turn errors into exit codes."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Sequence

from parallel_config import ReportedError
from parallel_train.cli.exits import DONE, INTERRUPTED, fail
from parallel_train.run.shield import open_missing_streams

# Modules are imported when their command is chosen: `ptrain --help` must not pay for torch.
RUNNERS = {
    "train": "parallel_train.cli.train",
    "resume": "parallel_train.cli.resume",
    "plan": "parallel_train.cli.plan",
    "inspect": "parallel_train.cli.inspect",
    "verify": "parallel_train.cli.verify",
    "convert": "parallel_train.cli.convert",
    "publish": "parallel_train.cli.publish",
    "evaluate": "parallel_train.cli.evaluate",
    "report": "parallel_train.cli.report",
    "doctor": "parallel_train.cli.doctor",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run `ptrain` and leave the process with its exit code."""
    open_missing_streams()
    try:
        code = run(sys.argv[1:] if argv is None else list(argv))
        _leave_requests(code)
        sys.exit(code)
    except KeyboardInterrupt:
        print("ptrain: stopped", file=sys.stderr)
        _leave_requests(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, `head` say, had enough
        # Python flushes stdout once more at its exit, and would fail there again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(DONE)


def _leave_requests(code: int) -> None:
    """End here when a request to the Hub or a tracker was left to itself: an exit would wait."""
    if any(thread.name.startswith(("hub-", "sink-")) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command. Returns its exit code, one of `exits`."""
    if list(argv) == ["--version"]:
        # `ptrain doctor` lists the versions of everything.
        print(f"ptrain {importlib.metadata.version('parallel-train')}")
        return DONE
    # Imported here: parsing knows the commands, of which `resume --from_hub` fetches first.
    from parallel_train.cli.from_hub import fetched
    from parallel_train.cli.parsing import parse

    try:
        argv = fetched(argv)
        # Alone, `ptrain` shows what it can do.
        parsed = parse(list(argv) or ["--help"])
    except ReportedError as error:
        return fail(error, "ptrain " + " ".join(argv[:1]))
    module = importlib.import_module(RUNNERS[argv[0]])
    return int(module.run(parsed))
