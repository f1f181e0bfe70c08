"""parallel-ckpt for somebody with tensors of their own: no engine, no accelerate, no Hub.

Installed from wheels, so that an import which the package does not declare fails here.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/04_save_and_resume.py"
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PROCESS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "",  # the fresh environment compiles torch once, not at each start
}


def run(*words, cwd, timeout_s=150):
    """Output of a command that ends with 0 within its deadline."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCH and k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**kept, **PROCESS},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The interpreter of an environment that holds the package's wheel and what it declares."""
    uv = shutil.which("uv") or str(ROOT / ".uv/bin/uv")
    folder = tmp_path_factory.mktemp("alone")
    wheels, python = folder / "wheels", folder / "venv/bin/python"
    for package in ("parallel-config", "parallel-ckpt"):
        run(uv, "build", "--package", package, "--wheel", "--out-dir", wheels, cwd=ROOT)
    run(
        uv, "export", "--quiet", "--locked", "--package", "parallel-ckpt", "--no-hashes",
        "--no-emit-workspace", "--no-annotate", "--output-file", folder / "lock.txt",
        cwd=ROOT,
    )  # fmt: skip
    run(uv, "venv", "--python", sys.executable, folder / "venv", cwd=folder)
    run(
        uv, "pip", "install", "--python", python, "--find-links", wheels,
        "--constraint", folder / "lock.txt", "parallel-ckpt",
        cwd=folder, timeout_s=400,
    )  # fmt: skip
    run(uv, "pip", "check", "--python", python, cwd=folder)
    return python


def test_the_environment_holds_neither_engine_nor_hub(alone, tmp_path):
    script = (
        "from importlib.metadata import distributions; "
        "names = {d.name.lower().replace('_', '-') for d in distributions()}; "
        "print(sorted(n for n in names if n.startswith('parallel'))); "
        "print(names & {'accelerate', 'huggingface-hub', 'tyro', 'pyarrow'})"
    )
    found = run(alone, "-c", script, cwd=tmp_path).split("\n")
    assert found[:2] == ["['parallel-ckpt', 'parallel-config']", "set()"]


def test_the_example_goes_on_where_it_stopped(alone, tmp_path):
    for begin in (0, 3):
        text = run(alone, EXAMPLE, "run", cwd=tmp_path)
        assert f"begins at step {begin}\n" in text
        assert f"checkpoints/{begin + 3:06d}" in text


SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from parallel_ckpt import CheckpointSaver, read_start, restore
from parallel_config import Topology

dist.init_process_group("gloo")
topology = Topology(dp_shard=dist.get_world_size())
model = fully_shard(torch.nn.Linear(7, 5))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 7)).sum().backward()
optimizer.step()
if sys.argv[2] == "save":
    with CheckpointSaver(sys.argv[1], topology=topology) as saver:
        saver.save(step=1, samples_seen=2, model=model, optimizer=optimizer)
else:
    start = read_start(sys.argv[1], topology=topology)
    print("entries", restore(start.path, model, optimizer).num_optimizer_entries, flush=True)
total = model.weight.full_tensor().double().sum().item()
if dist.get_rank() == 0:
    print(f"sum {total:.17g}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_shards_of_two_ranks_are_taken_up_by_three_and_looked_at_without_torch(alone, tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED)

    def start(ranks, what):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        text = run(alone, *command, "sharded.py", "run", what, cwd=tmp_path)
        return next(line for line in text.splitlines() if line.startswith("sum ")), text

    saved, _ = start(2, "save")
    loaded, text = start(3, "load")
    assert loaded == saved
    assert text.count("entries 6") == 3
    look = (
        "import sys; from parallel_ckpt.inspect import inspect; "
        "from parallel_ckpt.verify import verify; from parallel_ckpt.convert import convert; "
        "print(inspect('run').render()); assert verify('run').ok; convert('run', 'out'); "
        "assert 'torch' not in sys.modules"
    )
    assert "dp_shard=2" in run(alone, "-c", look, cwd=tmp_path)
    assert (tmp_path / "out/model.safetensors").is_file()
