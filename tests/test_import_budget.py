"""What the command line may import before it knows that it needs it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "accelerate", "numpy", "pyarrow", "huggingface_hub")
RUN = """
import sys
from parallel_train.cli.app import run
try:
    code = run({words!r})
except SystemExit as error:
    code = error.code
assert code == {code}, code
loaded = [name for name in {heavy!r} if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "--print_config", "--steps", "5"], 0),
        (["train", "--steps", "0"], 2),
        (["inspect", "no/such/run"], 2),
        (["verify", "no/such/run"], 2),
    ],
)
def test_light_commands_import_nothing_heavy(words, code):
    script = RUN.format(words=words, code=code, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
