"""However a run is launched, and however often it is stopped: the same bytes at the end."""

import os
import re
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest

from launches import (
    FLAGS,
    MAIN,
    PTRAIN,
    SMALL,
    STEPS,
    TORCHRUN,
    Process,
    rows,
    steps_saved,
    weights,
)
from parallel_testing.ranks import free_port


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run of 80 updates on two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = Process(
        folder, *PTRAIN, "train", "--output_dir", "run", *FLAGS, "--nproc_per_node", 2
    )
    try:
        assert process.end() == 0, process.text
    finally:
        process.clean_up()
    assert steps_saved(folder / "run") == list(range(10, STEPS + 1, 10))
    return folder / "run"


def test_torchrun_and_our_launcher_train_the_same_bytes(start, undisturbed, tmp_path):
    process = start(
        *TORCHRUN, "--standalone", "--nproc-per-node", 2,
        "-m", "parallel_train", "train", "--output_dir", "run", *FLAGS,
    )  # fmt: skip
    assert process.end() == 0, process.text
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert process.text.count(f"finished: step {STEPS} of {STEPS}") == 1


def test_two_nodes_of_torchrun_train_the_same_bytes(start, undisturbed, tmp_path):
    port = free_port()
    agents = [
        start(
            *TORCHRUN, "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1,
            "--master-addr", "127.0.0.1", "--master-port", port,
            "-m", "parallel_train", "train", "--output_dir", "run", *FLAGS,
        )
        for node in (0, 1)
    ]  # fmt: skip
    assert [agent.end() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert "2 ranks" in agents[0].text
    assert "training" not in agents[1].text  # the main rank alone tells


def test_variables_that_another_launch_left_do_not_reach_the_ranks(start, train, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        left = {
            "MASTER_ADDR": "host.invalid",
            "MASTER_PORT": stranger.getsockname()[1],
            "LOCAL_RANK": 5,
            "GROUP_RANK": 3,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 2,
        }
        flags = [*SMALL, "--steps", 2, "--nproc_per_node", 2]
        both = [
            train(*flags, "--output_dir", name, **left, **more)
            for name, more in (("a", {}), ("b", {"GROUP_WORLD_SIZE": 9}))
        ]
        assert [process.end() for process in both] == [0, 0], both[0].text + both[1].text
        # One process alone has no ranks to meet.
        assert train(*SMALL, "--steps", 2, **left).end() == 0


def test_a_launch_within_a_launch_and_half_a_launch_are_refused(train):
    """Each in seconds, with the variable that is wrong."""
    within = train(*SMALL, "--nproc_per_node", 2, RANK=0, WORLD_SIZE=1)
    assert within.end(30) == 2
    assert "--nproc_per_node = 2, but RANK = 0 is set" in within.text
    half = train(*SMALL, RANK=0, WORLD_SIZE=2)
    assert half.end(60) == 2
    assert "MASTER_ADDR is not set, but RANK = 0 and WORLD_SIZE = 2 are." in half.text
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        taken = train(*SMALL, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        assert taken.end(60) == 2
        assert f"MASTER_PORT = {port} is taken on 127.0.0.1 by another process." in taken.text


SRUN = """
import os, shlex, signal, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--")]
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
tasks = [
    subprocess.Popen(words, env=os.environ | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)},
                     preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))
    for n in range(int(os.environ["SLURM_NTASKS"]))
]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import pathlib, sys
if sys.argv[1] == "requeue":
    pathlib.Path("requeued").write_text(sys.argv[2])
else:
    print("127.0.0.1")
"""


@pytest.fixture
def slurm(tmp_path):
    """What the guide's script finds on a cluster: stand-ins that start tasks as Slurm does."""
    programs = {"srun": SRUN, "scontrol": SCONTROL, "ptrain": MAIN}
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NTASKS": 2,
        "SLURM_NTASKS_PER_NODE": 2,
    }


def test_the_slurm_script_of_the_guide_saves_requeues_and_finishes(
    start, slurm, undisturbed, tmp_path
):
    """Signalled as `--signal=USR1@300` does, it saves and is requeued; then it runs to its end."""
    page = (Path(__file__).parents[3] / "docs/launching.md").read_text()
    script = re.search(r"```sh\n(#!/bin/bash\n.*?)```", page, re.DOTALL)[1]
    flags = shlex.join(map(str, FLAGS))
    for found, wanted in (("/shared/run", "run"), ("--parallelism.dp_shard -1", flags)):
        assert script.count(found) == 1
        script = script.replace(found, wanted)
    (tmp_path / "job.sh").write_text(script)
    job = start("bash", "job.sh", **slurm)
    job.wait_for_step(5)
    for pid in job.ranks.values():
        os.kill(pid, signal.SIGUSR1)
    assert job.end(90) == 75, job.text
    assert (tmp_path / "requeued").read_text() == str(os.getpid())
    assert len(steps_saved(tmp_path / "run")) == 1
    again = start("bash", "job.sh", **slurm)
    assert again.end() == 0, again.text
    assert weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.parametrize("num_agents", [1, 2])
def test_a_restarted_worker_ends_with_the_bytes_of_an_undisturbed_run(
    start, undisturbed, tmp_path, num_agents
):
    """With several agents each counts its own restarts: one saw a death, the other a newcomer."""
    port = free_port()
    meeting = [
        "--nnodes", num_agents, "--rdzv-backend", "c10d", "--rdzv-id", "job",
        "--rdzv-endpoint", f"127.0.0.1:{port}",
    ]  # fmt: skip
    agents = [
        start(
            *TORCHRUN, "--nproc-per-node", 2 // num_agents, "--max-restarts", 1,
            *(meeting if num_agents > 1 else ["--master-port", port]),
            "-m", "parallel_train", "train", "--output_dir", "run", *FLAGS,
        )
        for _ in range(num_agents)
    ]  # fmt: skip
    agents[0].wait_for_step(15)
    ranks = {rank: pid for agent in agents for rank, pid in agent.ranks.items()}
    os.kill(ranks[1], signal.SIGKILL)
    assert [agent.end() for agent in agents] == [0] * num_agents, agents[0].text
    text = "".join(agent.text for agent in agents)
    assert "rank 0 leaves: rank 1 gives no answer: killed, or cut off" in text
    assert f"resuming {tmp_path / 'run/checkpoints'}/0000" in text
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert weights(tmp_path / "run") == weights(undisturbed)


def test_a_signal_saves_once_and_the_requeued_job_goes_on(train, undisturbed, tmp_path):
    """Stopped twice, at whatever update: first by SIGTERM to one rank, then by SIGUSR1."""
    flags = [*FLAGS, "--checkpoint.save_freq", "0", "--nproc_per_node", 2]
    saved = [0]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process = train(*flags)
        process.wait_for_step(saved[-1] + 5)
        to_one = number == signal.SIGTERM
        os.kill(process.ranks[1] if to_one else process.popen.pid, number)
        assert process.end(90) == 75, process.text
        saved.append(rows(tmp_path / "run")[-1]["step"])
        assert steps_saved(tmp_path / "run") == saved[1:]
    again = train(*flags)
    assert again.end() == 0, again.text
    assert f"(step {saved[-1]})" in again.text
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert weights(tmp_path / "run") == weights(undisturbed)
