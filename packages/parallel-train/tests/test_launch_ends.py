"""Ranks that die, wait or are signalled: each run ends, is saved and says why."""

import os
import signal
import time

import pytest
from torch.distributed.run import get_args_parser

from launches import (
    ENDLESS,
    TORCHRUN,
    descendants,
    rows,
    steps_saved,
    wait_until_gone,
)
from parallel_ckpt import newest_intact


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
