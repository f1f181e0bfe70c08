"""The multi-GPU suite fails where GPUs are missing: a skip would read like a result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "tests-gpu"
# The count of the machine is replaced, so that the test says the same on every machine.
WITH_A_COUNT = """
import sys, pytest, torch
torch.cuda.device_count = lambda: int(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


def outcome(count, *arguments, suite=SUITE, **environ):
    """(exit code, output) of the suite under a machine with that many GPUs."""
    env = {**os.environ, "PARALLEL_TEST_DEVICE": "cuda", "PARALLEL_TEST_GPUS": "4", **environ}
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", str(suite), *arguments]
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_COUNT, str(count), *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("count", "wanted"), [(3, 4), (0, 1)])
def test_missing_gpus_are_an_error(count, wanted):
    code, text = outcome(count, PARALLEL_TEST_GPUS=str(wanted))
    assert code == pytest.ExitCode.USAGE_ERROR, text
    assert (
        f"{wanted} CUDA devices are needed, {count} were found; --allow-missing skips these tests."
    ) in text


def test_missing_gpus_may_be_allowed_by_name():
    code, text = outcome(1, "--allow-missing", suite=SUITE / "test_engine_parity.py")
    assert code == 0, text
    assert "4 CUDA devices are needed, 1 were found" in text
    assert "passed" not in text


def test_a_device_that_is_not_known_is_an_error():
    code, text = outcome(4, PARALLEL_TEST_DEVICE="gpu")
    assert code == pytest.ExitCode.USAGE_ERROR, text
    assert "PARALLEL_TEST_DEVICE = 'gpu', but it must be cpu or cuda." in text


def test_a_test_that_skips_where_all_must_run_fails(tmp_path):
    (tmp_path / "conftest.py").write_text((SUITE / "conftest.py").read_text())
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\ndef test_it(device):\n    pytest.skip('not today')\n"
    )
    code, text = outcome(4, suite=tmp_path)
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert "skipped on 4 GPUs, where every test must run" in text


def test_one_gpu_may_skip_what_it_cannot_show_and_says_so(tmp_path):
    (tmp_path / "conftest.py").write_text((SUITE / "conftest.py").read_text())
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\ndef test_it(device):\n    pytest.skip('not today')\n"
    )
    code, text = outcome(1, suite=tmp_path, PARALLEL_TEST_GPUS="1")
    assert (code, "not today" in text) == (0, True), text
