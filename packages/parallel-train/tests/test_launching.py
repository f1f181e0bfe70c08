"""Starting, stopping and restarting runs as people and schedulers do: real processes throughout."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from parallel_ckpt import newest_intact
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


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


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


# --- ways to start -------------------------------------------------------------------------------


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


# --- ranks that die ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_all_and_is_named(train, rank):
    process = train(*ENDLESS, "--nproc_per_node", 2)
    process.wait_for_step(5)
    ranks = process.ranks
    os.kill(ranks[rank], signal.SIGKILL)
    killed = time.monotonic()
    assert process.end(60) == 1
    assert time.monotonic() - killed < 30
    wait_until_gone(ranks.values(), 0.1)
    assert f"rank {rank} (process {ranks[rank]}) was ended by SIGKILL first" in process.text
    assert f"ptrain: rank {1 - rank} leaves: rank {rank} " in process.text
    assert "Traceback" not in process.text


def test_ranks_wait_for_one_another_for_timeout_s(train):
    process = train(*ENDLESS, "--nproc_per_node", 2, "--timeout_s", 4)
    process.wait_for_step(3)
    stopped = process.ranks[1]
    os.kill(stopped, signal.SIGSTOP)
    process.wait_for_text("rank 0 failed: RuntimeError")
    os.kill(stopped, signal.SIGCONT)  # or the launcher waits for it for a minute
    assert process.end(60) == 1
    assert "Timed out waiting 4000ms" in process.text
    refused = train(*ENDLESS, "--timeout_s", 0)
    assert refused.end() == 2
    assert "--timeout_s = 0.0, but it must be a number of seconds above 0. Use 600." in refused.text


def test_ranks_of_a_killed_launcher_save_and_leave(train, tmp_path):
    """Its ranks see that it is gone, save together and leave: no orphan keeps the machine."""
    process = train(*ENDLESS, "--nproc_per_node", 2, "--dataset.num_workers", 1)
    process.wait_for_step(5)
    pids = descendants(process.popen.pid)
    assert len(pids) >= 4  # two ranks, a loader worker each
    process.popen.kill()
    wait_until_gone(pids, 30)
    assert steps_saved(tmp_path / "run") == [rows(tmp_path / "run")[-1]["step"]]


# --- signals -------------------------------------------------------------------------------------


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


def test_a_signal_that_reaches_launcher_and_ranks_alike_is_one_request(train, tmp_path):
    """Schedulers signal every process of a job, and the launcher passes its own on."""
    process = train(*ENDLESS, "--nproc_per_node", 2, "--dataset.num_workers", 1)
    process.wait_for_step(5)
    for pid in [*descendants(process.popen.pid), process.popen.pid]:
        os.kill(pid, signal.SIGTERM)
    assert process.end(60) == 75, process.text
    assert len(steps_saved(tmp_path / "run")) == 1
    assert "Traceback" not in process.text


def test_a_second_signal_stops_at_once_and_harms_nothing(train, tmp_path):
    process = train(*ENDLESS, "--checkpoint.save_freq", 5, "--nproc_per_node", 2)
    process.wait_for(lambda: (tmp_path / "run/checkpoints/last").exists())
    ranks = process.ranks
    for pid in ranks.values():  # as if deep in a computation: the first signal finds no answer
        os.kill(pid, signal.SIGSTOP)
    process.popen.terminate()
    process.wait_for_text("SIGTERM: saving, then exiting; send it again to stop at once")
    time.sleep(2.1)
    process.popen.terminate()
    assert process.end(10) == 128 + signal.SIGTERM, process.text
    wait_until_gone(ranks.values(), 1)
    newest, skipped = newest_intact(tmp_path / "run")
    assert newest == tmp_path / f"run/checkpoints/{steps_saved(tmp_path / 'run')[-1]:06d}"
    assert not skipped


def test_a_signal_during_a_save_lets_it_finish(train, tmp_path):
    process = train(
        *ENDLESS, "--checkpoint.save_freq", 1, "--checkpoint.keep_last", 3, "--nproc_per_node", 2,
    )  # fmt: skip
    folder = tmp_path / "run/checkpoints"
    process.wait_for(lambda: any(path.name.startswith(".0") for path in folder.glob(".*.tmp-*")))
    process.popen.terminate()
    assert process.end(90) == 75, process.text
    newest, skipped = newest_intact(tmp_path / "run")
    assert newest == folder / f"{rows(tmp_path / 'run')[-1]['step']:06d}"
    assert not skipped
    assert not list(folder.glob(".*"))


def test_ranks_that_do_not_leave_within_the_grace_are_killed_and_named(train):
    process = train(*ENDLESS, "--nproc_per_node", 2, "--grace_s", 1)
    process.wait_for_step(2)
    os.kill(process.ranks[1], signal.SIGSTOP)
    process.popen.send_signal(signal.SIGUSR1)
    assert process.end(20) == 128 + signal.SIGUSR1, process.text
    assert "ranks [0, 1] did not leave within --grace_s 1 after SIGUSR1" in process.text


def test_a_signal_while_ranks_start_ends_the_run_as_preempted(train, tmp_path):
    """Before torch is imported, even: nothing is lost, and 75 says so."""
    process = train(*ENDLESS, "--nproc_per_node", 2, "--grace_s", 120)
    process.wait_for(lambda: len(process.ranks) == 2)
    process.popen.send_signal(signal.SIGUSR1)
    assert process.end() == 75, process.text
    assert "stopped on request before the first update" in process.text
    assert not rows(tmp_path / "run")


def test_one_process_answers_signals_by_itself(train, tmp_path):
    process = train(*ENDLESS, "--dataset.num_workers", 1)
    process.wait_for_step(5)
    process.popen.send_signal(signal.SIGINT)
    assert process.end(60) == 75, process.text
    assert "SIGINT: saving at the end of this update" in process.text
    assert steps_saved(tmp_path / "run") == [rows(tmp_path / "run")[-1]["step"]]


def test_under_torchrun_the_agent_exits_with_1_after_the_ranks_have_saved(start, tmp_path):
    """As documented: SIGUSR1 needs naming, and the agent has no exit code for a stopped run."""
    time_to_save = ["--shutdown-timeout", 60]  # torch 2.11 has no such flag, and gives 30 s
    if time_to_save[0] not in get_args_parser().format_help():
        time_to_save = []
    process = start(
        *TORCHRUN, "--standalone", "--nproc-per-node", 2,
        "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", *time_to_save,
        "-m", "parallel_train", "train", "--output_dir", "run", *ENDLESS,
    )  # fmt: skip
    process.wait_for_step(5)
    process.popen.send_signal(signal.SIGUSR1)
    assert process.end(60) == 1
    assert "stopped on request, checkpoint written" in process.text
    assert steps_saved(tmp_path / "run") == [rows(tmp_path / "run")[-1]["step"]]
