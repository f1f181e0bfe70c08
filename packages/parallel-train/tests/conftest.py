"""Shared by the suite: a test that leaves something behind fails."""

import signal
import sys
from pathlib import Path

from parallel_testing.leaks import no_leaks  # noqa: F401

# What a shell starts in the background ignores SIGINT, what `nohup` starts SIGHUP, and so would all
# that a test starts.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

sys.path.append(str(Path(__file__).parent))  # tests import `launches` by its name
from launches import start, train  # noqa: E402, F401
