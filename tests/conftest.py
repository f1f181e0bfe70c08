"""Running the product as a person does: in a process of its own, from the command line."""

import json
import subprocess
import sys

import pytest

from parallel_testing.leaks import no_leaks  # noqa: F401
from parallel_testing.programs import clean_environment, run_ptrain

SMALL = [
    "--policy.dim_model",
    "32",
    "--policy.dim_feedforward",
    "64",
    "--policy.n_vae_layers",
    "1",
    "--dataset.episodes",
    "0",
    "1",
    "--batch_size",
    "8",
    "--seed",
    "3",
    "--log_freq",
    "1000",
]
EXACT = ("loss", "grad_norm", "lr", "samples_seen")


class Ptrain:
    """`python -m parallel_train` in a folder of its own, with a deadline.

    A call forks the command, and what `--nproc_per_node` asks for becomes ranks as torchrun starts
    them. `start` starts a new interpreter: for signals, deaths and our launcher.
    """

    def __init__(self, folder):
        self.folder = folder

    def command(self, *words):
        return [sys.executable, "-m", "parallel_train", *map(str, words)]

    @property
    def environ(self):
        return clean_environment()

    def __call__(self, *words, code=0, timeout_s=150, env=None):
        return run_ptrain(*words, cwd=self.folder, code=code, env=env, timeout_s=timeout_s)

    def start(self, *words):
        return subprocess.Popen(
            self.command(*words),
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def rows(self, run):
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def ptrain(tmp_path):
    return Ptrain(tmp_path)


@pytest.fixture
def small():
    """Flags of a run that takes a second."""
    return list(SMALL)


@pytest.fixture
def same_numbers():
    """Compare two runs' rows; `rel=0` means to the last bit."""

    def compare(found, wanted, rel=0.0):
        assert [row["step"] for row in found] == [row["step"] for row in wanted]
        for a, b in zip(found, wanted, strict=True):
            for name in EXACT:
                if rel:
                    assert a[name] == pytest.approx(b[name], rel=rel)
                else:
                    assert a[name] == b[name], f"{name} at step {a['step']}"

    return compare
