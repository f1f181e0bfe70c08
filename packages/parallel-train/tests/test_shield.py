"""Whatever happens to stdout and stderr, a run goes on."""

import json
import os
import signal
import subprocess
import sys

import pytest

from parallel_train.run import shield
from parallel_train.run.shield import ShieldedStream, shielded

SCRIPT = """
import sys
from parallel_train.run.shield import open_missing_streams, shielded
open_missing_streams()
with shielded():
    for number in range(3):
        print("line", number, "\\u00fc")
    print("said", file=sys.stderr)
    open(sys.argv[1], "w").write("went on")
"""
LOST = (
    "ptrain: stdout cannot be written ({}). Its lines are dropped, and the run goes on; "
    "metrics.jsonl holds every update.\nsaid\n"
)


def run_script(tmp_path, environ=None, **streams):
    """stdout, stderr and whether it came to its end, of a process with these streams."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "end")],
        env={**os.environ, **(environ or {})}, check=False, timeout=60, **streams,
    )  # fmt: skip
    assert (done.returncode, (tmp_path / "end").read_text()) == (0, "went on")
    return done


@pytest.mark.parametrize(
    ("ends", "reason"), [(os.pipe, "Broken pipe"), (os.openpty, "Input/output error")]
)
def test_a_reader_that_leaves_and_a_terminal_that_closes(tmp_path, ends, reason):
    other, ours = ends()
    os.close(other)
    done = run_script(tmp_path, stdout=ours)
    os.close(ours)
    assert done.stderr.decode() == LOST.format(reason)


def test_a_full_disk(tmp_path):
    with open("/dev/full", "wb") as full:
        done = run_script(tmp_path, stdout=full)
        assert done.stderr.decode() == LOST.format("No space left on device")
        run_script(tmp_path, stdout=full, stderr=full)


def test_a_console_of_ascii(tmp_path):
    done = run_script(tmp_path, environ={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.stdout == b"".join(rb"line %d \xfc" % n + b"\n" for n in range(3))


def test_streams_that_were_closed_before_the_start(tmp_path):
    """Else the next file that is opened is stdout, and gets what is printed."""

    def close():
        os.close(0)
        os.close(1)
        os.close(2)

    run_script(tmp_path, stdout=None, stderr=None, preexec_fn=close)


def test_a_pager_that_is_not_read_costs_lines_and_one_wait(monkeypatch, capfd):
    monkeypatch.setattr(shield, "STALL_S", 0.05)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as under:
        stream = ShieldedStream(under, "stdout")
        stream.other = sys.stderr
        for _ in range(100):
            print("x" * 2000, file=stream)
        os.read(reading, 1 << 20)
        print("read again", file=stream)
        assert os.read(reading, 1 << 20).endswith(b"read again\n")
    os.close(reading)
    assert capfd.readouterr().err.count("(nothing was read for 0.05 s)") == 1


def test_within_a_program_with_a_stream_of_its_own_nothing_is_replaced(capsys):
    before = sys.stdout, sys.stderr
    with shielded():
        print("seen")
        assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "seen\n"


def test_a_run_whose_reader_left_and_whose_terminal_closed_saves_and_leaves(tmp_path):
    """`ptrain train | head -n 3`, and later SIGHUP: one start shows both."""
    command = [sys.executable, "-m", "parallel_train", "train", "--log_freq", "1"]
    command += ["--steps", "1000000", "--checkpoint.save_freq", "0", "--output_dir", "run"]
    command += ["--batch_size", "4", "--policy.dim_model", "32", "--policy.dim_feedforward", "64"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PARALLEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            while not process.stdout.readline().startswith("step"):
                assert process.poll() is None, process.stderr.read()
            process.stdout.close()
            assert "stdout cannot be written (Broken pipe)" in process.stderr.readline()
            process.send_signal(signal.SIGHUP)
            assert process.wait(60) == 75
            assert process.stderr.read().startswith("SIGHUP: saving at the end of this update")
        finally:
            process.kill()
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in rows]
    assert steps == list(range(1, len(steps) + 1))
    assert (tmp_path / f"run/checkpoints/{steps[-1]:06d}").is_dir()


@pytest.mark.parametrize("ignored", [True, False])
def test_sighup_asks_to_stop_unless_the_process_was_started_under_nohup(ignored):
    script = (
        "import os, signal; from parallel_train.run.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGHUP); print(stop.is_asked())\n"
    )
    way = signal.SIG_IGN if ignored else signal.SIG_DFL
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, way),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{not ignored}\n")
