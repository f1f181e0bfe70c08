"""Shared by the suite: a test that leaves something behind fails."""

import signal

from parallel_testing.leaks import no_leaks  # noqa: F401

# What a shell starts in the background ignores SIGINT, what `nohup` starts SIGHUP, and so would all
# that a test starts.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
