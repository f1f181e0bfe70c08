"""parallel-engine for somebody with a model and a loop of their own, and nothing else of ours."""

import re
import sys
from pathlib import Path

import pytest

from parallel_testing.wheels import install, installed_names, ours, run

ROOT = Path(__file__).parents[1]

EXAMPLE = ROOT / "examples/01_train_engine.py"


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
    """The interpreter of an environment that holds the engine and what it declares."""
    return install("parallel-engine", tmp_path_factory.mktemp("alone"), root=ROOT)


def test_the_environment_holds_nothing_else_of_ours(alone, tmp_path):
    found = ours(installed_names(alone, tmp_path))
    assert found == {"parallel-config", "parallel-engine"}


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
