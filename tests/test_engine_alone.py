"""parallel-engine for somebody with a model and a loop of their own, and nothing else of ours.

Installed from wheels, so that an import which the package does not declare fails here.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/01_train_engine.py"
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(*words, cwd, code=0, timeout_s=150, **variables):
    """Output of a command that ends with `code` within its deadline."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCH and k != "PYTHONPATH"}
    environ = {**kept, "OMP_NUM_THREADS": "1", "PARALLEL_DEVICE": "cpu", **variables}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def losses(text):
    """The printed losses, by step."""
    found = re.findall(r"step +(\d+) +loss ([\d.]+)", text)
    assert [int(step) for step, _ in found] == list(range(1, 25)), text
    return [float(loss) for _, loss in found]


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Losses of the loop without the engine."""
    twin = ROOT / "examples/01_train_torch.py"
    found = losses(run(sys.executable, twin, cwd=tmp_path_factory.mktemp("twin")))
    assert found[-1] < found[0] / 2
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The interpreter of an environment that holds the engine's wheel and what it declares."""
    uv = shutil.which("uv") or str(ROOT / ".uv/bin/uv")
    folder = tmp_path_factory.mktemp("alone")
    wheels, python = folder / "wheels", folder / "venv/bin/python"
    for package in ("parallel-config", "parallel-engine"):
        run(uv, "build", "--package", package, "--wheel", "--out-dir", wheels, cwd=ROOT)
    run(
        uv, "export", "--quiet", "--locked", "--package", "parallel-engine", "--no-hashes",
        "--no-emit-workspace", "--no-annotate", "--output-file", folder / "lock.txt",
        cwd=ROOT,
    )  # fmt: skip
    run(uv, "venv", "--python", sys.executable, folder / "venv", cwd=folder)
    run(
        uv, "pip", "install", "--python", python, "--find-links", wheels,
        "--constraint", folder / "lock.txt", "parallel-engine",
        cwd=folder, timeout_s=400,
    )  # fmt: skip
    run(uv, "pip", "check", "--python", python, cwd=folder)
    return python


def test_the_environment_holds_nothing_else_of_ours(alone, tmp_path):
    script = (
        "from importlib.metadata import distributions; "
        "print(sorted(d.name for d in distributions() if d.name.startswith('parallel')))"
    )
    found = run(alone, "-c", script, cwd=tmp_path)
    assert found.strip() == "['parallel-config', 'parallel-engine']"


def test_one_process_equals_the_twin(alone, twin, tmp_path):
    assert losses(run(alone, EXAMPLE, cwd=tmp_path)) == pytest.approx(twin, abs=2e-6)


KINDS = {
    "ddp": (2, []),
    "fsdp": (2, ["--dp_shard", 2]),
    "hsdp": (4, ["--dp_replicate", 2, "--dp_shard", 2]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_several_ranks_equal_the_twin(alone, twin, tmp_path, kind):
    ranks, degrees = KINDS[kind]
    torchrun = [alone, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    text = run(*torchrun, EXAMPLE, *degrees, cwd=tmp_path)
    assert f"on {kind}, " in text
    assert losses(text) == pytest.approx(twin, abs=2e-6)


LAUNCH_COMMAND = ["-m", "accelerate.commands.launch", "--main_process_port", 0]


@pytest.mark.parametrize(
    ("flags", "kind"),
    [(["--cpu"], "single"), (["--multi_gpu", "--num_processes", 2], "fsdp")],
    ids=["one", "two"],
)
def test_a_plain_accelerate_launch_starts(alone, twin, tmp_path, flags, kind):
    """Without a config file; what it exports on its own must pass the guard."""
    command = [alone, *LAUNCH_COMMAND, *flags, EXAMPLE, "--dp_shard", -1]
    text = run(*command, cwd=tmp_path, HF_HOME=str(tmp_path))
    assert f"on {kind}, " in text
    assert losses(text) == pytest.approx(twin, abs=2e-6)


def test_an_accelerate_launch_that_would_change_the_run_is_refused(alone, tmp_path):
    command = [alone, *LAUNCH_COMMAND, "--use_fsdp", "--num_processes", 2, EXAMPLE]
    text = run(*command, cwd=tmp_path, code=1, HF_HOME=str(tmp_path))
    assert "ACCELERATE_USE_FSDP = 'true'" in text
    assert "step  1" not in text
