"""Shared by the suite: a test that leaves something behind fails."""

import signal

from parallel_testing.leaks import no_leaks  # noqa: F401

# What a shell starts in the background ignores SIGINT, and so would all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
