"""parallel-ckpt for somebody with tensors of their own: no engine, no accelerate, no Hub."""

from pathlib import Path

import pytest

from parallel_testing.wheels import install, installed_names, ours, run

ROOT = Path(__file__).parents[1]

EXAMPLE = ROOT / "examples/04_save_and_resume.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The interpreter of an environment that holds the package and what it declares."""
    return install("parallel-ckpt", tmp_path_factory.mktemp("alone"), root=ROOT)


def test_the_environment_holds_neither_engine_nor_hub(alone, tmp_path):
    names = installed_names(alone, tmp_path)
    assert ours(names) == {"parallel-ckpt", "parallel-config"}
    assert not names & {"accelerate", "huggingface-hub", "tyro", "pyarrow"}


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
    entries = restore(start.path, model, optimizer).num_optimizer_entries
    print(f"entries {entries}\\n", end="", flush=True)  # in one piece: ranks share the console
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
