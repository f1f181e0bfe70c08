"""Shared by the suite: what the ranks' forkserver imports once instead of every rank anew."""

import sys
from pathlib import Path

from parallel_testing.leaks import no_leaks  # noqa: F401
from parallel_testing.ranks import preload

preload("parallel_ckpt.save.saver", "parallel_ckpt.load.resume")

# Ranks import the test modules by file, and these the helpers by name.
sys.path.append(str(Path(__file__).parent))
