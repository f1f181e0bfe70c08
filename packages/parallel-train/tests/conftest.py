"""Shared by the suite: a test that leaves something behind fails."""

from parallel_testing.leaks import no_leaks  # noqa: F401
