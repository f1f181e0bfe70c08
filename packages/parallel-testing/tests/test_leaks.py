"""Each kind of leak is found, in a pytest of its own; a clean test passes."""

import subprocess
import sys
import textwrap

SUITE = """
import os, subprocess, sys, threading, time
import torch.distributed as dist

def test_clean():
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_thread():
    threading.Thread(target=time.sleep, args=(8,), name="straggler", daemon=True).start()

def test_process():
    globals()["child"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(8)"])

def test_process_that_is_still_loading_its_program():  # for a moment it has no command line
    globals()["shell"] = subprocess.Popen([""], executable="/bin/sh", stdin=subprocess.PIPE)

def test_group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
"""


def test_leaks_are_found_and_named(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "from parallel_testing import leaks\n"
        "from parallel_testing.leaks import no_leaks\n"
        "leaks.GRACE_S = 0.5\n"
    )
    (tmp_path / "test_suite.py").write_text(textwrap.dedent(SUITE))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    text = done.stdout
    assert done.returncode == 1, text + done.stderr
    assert "variable LEFT_BEHIND = '1', was None" in text
    assert "thread 'straggler'" in text
    assert "time.sleep(8)" in text
    assert "no command line" in text
    assert "a process group that is still initialised" in text
    assert "ERROR test_suite.py::test_clean" not in text
    assert "6 passed, 5 errors" in text
