"""Requests to stop: the first signal, a later one, and those that come too early."""

import os
import signal
import subprocess
import sys
import time

import pytest

from parallel_train.run.signals import (
    STOP_SIGNALS,
    StopRequest,
    held_back,
    stop_without_launcher,
)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_noted_and_announced_once(number, capfd):
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with StopRequest(announce="stopping") as stop:
        assert stop.received is None
        send(number)
        assert stop.received is number
        send(number)  # at once: the same request, come by another way
    assert capfd.readouterr().err == f"{number.name}: stopping\n"
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


def test_a_later_signal_of_any_kind_means_at_once():
    ended = []
    with StopRequest(on_second=ended.append, one_request_s=0.05) as stop:
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        assert ended == []
        time.sleep(0.1)
        send(signal.SIGTERM)
    assert stop.received is signal.SIGUSR1
    assert ended == [signal.SIGTERM]


def test_the_command_ends_at_once_with_the_code_of_a_process_that_died_of_the_signal():
    script = (
        "import os, time; from parallel_train.cli.exits import end_at_once\n"
        "from parallel_train.run.signals import StopRequest\n"
        "with StopRequest(on_second=end_at_once, one_request_s=0):\n"
        "    os.kill(os.getpid(), 10); time.sleep(0.01); os.kill(os.getpid(), 15)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM


def test_a_signal_before_a_process_can_answer_waits_for_it():
    script = (
        "import os, signal, time; from parallel_train.run.signals import StopRequest\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1)\n"
        "with StopRequest() as stop: print(stop.received.name)\n"
    )
    with held_back():
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)


def test_a_process_is_asked_to_stop_when_its_launcher_ends_and_not_before():
    reading, writing = os.pipe()
    with StopRequest() as stop:
        stop_without_launcher(reading)
        time.sleep(0.1)
        assert stop.received is None
        os.close(writing)
        deadline = time.monotonic() + 10
        while stop.received is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stop.received is signal.SIGTERM
    os.close(reading)


def test_a_descriptor_that_is_not_open_here_does_not_stop_the_process():
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with StopRequest() as stop:
        stop_without_launcher(reading)
        time.sleep(0.2)
    assert stop.received is None


def test_the_launcher_starts_in_a_moment():
    """It lives beside the ranks, and must not cost the memory and the seconds of torch."""
    script = "import sys, parallel_train.cli.launcher, parallel_train.cli.train\n"
    script += "sys.exit('torch' in sys.modules)\n"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
