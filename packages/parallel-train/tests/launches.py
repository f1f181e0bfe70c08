"""Processes that tests start, watch and signal, as people and schedulers do."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_config.environment import without_launch

TIMEOUT_S = 150
STEPS = 80
SMALL = shlex.split(
    "--policy.dim_model 32 --policy.dim_feedforward 64 --policy.n_vae_layers 1 "
    "--dataset.episodes 0 1 --batch_size 4 --seed 3 --log_freq 1000"
)
FLAGS = [*SMALL, "--steps", STEPS, "--checkpoint.save_freq", "10", "--resume", "auto"]
ENDLESS = [*SMALL, "--steps", "1000000", "--checkpoint.save_freq", "0", "--resume", "auto"]
MAIN = "from parallel_train.__main__ import main; main()"
PTRAIN = [sys.executable, "-m", "parallel_train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Process:
    """A command in a folder, with what it printed, and an end whatever happens."""

    def __init__(self, folder, *words, **environ):
        self.folder = folder
        self._log = (folder / f"log-{time.monotonic_ns()}").open("w+b")
        self.popen = subprocess.Popen(
            [str(word) for word in words],
            cwd=folder,
            env={
                **without_launch(os.environ),
                "OMP_NUM_THREADS": "1",
                "PARALLEL_DEVICE": "cpu",
                **{name: str(value) for name, value in environ.items()},
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def text(self):
        return Path(self._log.name).read_text(errors="replace")

    def end(self, timeout_s=TIMEOUT_S):
        """Exit code."""
        return self.popen.wait(timeout_s)

    def wait_for(self, condition):
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.popen.poll() is None, self.text
            assert time.monotonic() < deadline, f"waited too long\n{self.text}"
            time.sleep(0.005)

    def wait_for_step(self, step, run="run"):
        self.wait_for(lambda: len(rows(self.folder / run)) >= step)

    def wait_for_text(self, text):
        self.wait_for(lambda: text in self.text)

    @property
    def ranks(self):
        """Process ids of the ranks, by rank; their loader workers come after them."""
        found = {}
        for pid in reversed(descendants(self.popen.pid)):
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            rank = dict(line.split("=", 1) for line in environ if "=" in line).get("RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def clean_up(self):
        for pid in [*descendants(self.popen.pid), self.popen.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        self._log.close()


def children(pid):
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def descendants(pid):
    below = children(pid)
    return [*below, *(further for child in below for further in descendants(child))]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, within_s=20):
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


def rows(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def weights(run, step=STEPS):
    return (run / f"checkpoints/{step:06d}/pretrained_model/model.safetensors").read_bytes()


def steps_saved(run):
    return sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())


@pytest.fixture
def start(tmp_path):
    """Start a command in the test's folder; whatever still runs at the end is killed."""
    started = []

    def begin(*words, **environ):
        started.append(Process(tmp_path, *words, **environ))
        return started[-1]

    yield begin
    for process in started:
        process.clean_up()


@pytest.fixture
def train(start):
    """Start `ptrain train` into the folder `run`."""
    return lambda *flags, **environ: start(
        *PTRAIN, "train", "--output_dir", "run", *flags, **environ
    )
