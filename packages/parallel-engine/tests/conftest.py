"""Shared by the suite: what the ranks' forkserver imports once instead of every rank anew."""

from parallel_testing.leaks import no_leaks  # noqa: F401
from parallel_testing.ranks import preload

preload("parallel_engine")
