"""`--nproc_per_node N`: the ranks of this machine, started, watched and ended together.

No torch here: the launcher starts in a moment and lives beside the ranks for days.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel_config.environment import LAUNCHER_VARIABLE, LISTEN_VARIABLE, without_launch
from parallel_train.cli.exits import (
    DONE,
    FAILED,
    NOT_PUBLISHED,
    PREEMPTED,
    WRONG_INPUT,
    by_signal,
    is_well,
)
from parallel_train.run.signals import StopRequest, held_back

PEERS_S = 30.0
"""Seconds that the other ranks have to leave by themselves once one has failed."""
POLL_S = 0.05
HOST = "127.0.0.1"
_HINTS: dict[int, str] = {
    signal.SIGKILL: " If you did not send it, the kernel did, because memory ran out: see `dmesg`, "
    "and use a smaller --batch_size or fewer --dataset.num_workers.",
    signal.SIGBUS: " The usual cause: the shared memory (/dev/shm) is full.",
    signal.SIGSEGV: " A library crashed: PYTHONFAULTHANDLER=1 shows where.",
}


@dataclass(frozen=True)
class Worker:
    """One rank, in a process group of its own, which its loader workers belong to as well."""

    rank: int
    process: subprocess.Popen[bytes]

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone: its loader workers follow it."""
        if self.is_running:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End the rank and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            # The session that the rank was started in: its loader workers are in the same group.
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def hint(self) -> str:
        """What a death by signal mostly means, as a sentence that follows."""
        return _HINTS.get(-self.process.returncode, "")

    def __str__(self) -> str:
        code = self.process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"
        return f"rank {self.rank} (process {self.process.pid}) {how}"


def without_flags(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """`argv` less `--name value` and `--name=value`, in either spelling."""
    kept: list[str] = []
    skip = False
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if skip:
            skip = False
        elif word.startswith("--") and name in names:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept


def launch(argv: Sequence[str], *, nproc_per_node: int, grace_s: float) -> int:
    """Run `ptrain <argv>` on `nproc_per_node` ranks of this machine and wait for them.

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to the ranks, which have `grace_s` seconds to
    write a checkpoint and leave; a second signal ends them at once. Returns 0 when all ended well,
    75 when they were preempted and saved, 2 when the input was wrong, 128 + n when signal n ended
    them, by coming a second time or because they did not leave in time, 1 otherwise. No rank
    outlives the call, and ranks whose launcher was killed stop.
    """
    workers: list[Worker] = []
    ended_by: list[int] = []

    def at_once(number: int) -> None:
        ended_by.append(number)
        for worker in workers:
            worker.kill()

    stop = StopRequest(
        announce="saving, then exiting; send it again to stop at once", on_second=at_once
    )
    with stop:
        try:
            with _start(workers, argv, nproc_per_node):
                complaint, ended = _wait(workers, stop, grace_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.process.wait()
    if ended_by:
        return by_signal(ended_by[0])
    if complaint:
        print(f"ptrain: {complaint}", file=sys.stderr)
    if ended is not None:
        return by_signal(ended)
    return _verdict([worker.process.returncode for worker in workers])


@contextlib.contextmanager
def _start(workers: list[Worker], argv: Sequence[str], count: int) -> Iterator[None]:
    """Start the ranks. Within, they know that the launcher is there."""
    # -u: lines of a rank that is killed must not stay in a buffer.
    command = [sys.executable, "-u", "-m", "parallel_train", *argv]
    # Opened here and handed to rank 0, so that no other program can take the port in between.
    with socket.create_server((HOST, 0), backlog=count) as meeting, _pipe() as watched:
        for rank in range(count):
            with held_back():  # until the rank can answer; it inherits that
                # A session of its own keeps Ctrl-C in a terminal from reaching ranks twice.
                process = subprocess.Popen(
                    command,
                    env=_environment(rank, count, meeting, watched),
                    pass_fds=[watched, *([meeting.fileno()] if rank == 0 else [])],
                    start_new_session=True,
                )
                workers.append(Worker(rank, process))
        meeting.close()  # it is rank 0's now: where that rank is gone, nothing must answer
        yield


def _environment(rank: int, count: int, meeting: socket.socket, watched: int) -> dict[str, str]:
    """The launcher's own environment, and what a rank needs in addition."""
    given = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": meeting.getsockname()[1],
        LAUNCHER_VARIABLE: watched,
        **({LISTEN_VARIABLE: meeting.fileno()} if rank == 0 else {}),
    }
    # One thread per rank, as torchrun does: ranks that each use every core slow one another down.
    return {
        "OMP_NUM_THREADS": "1",
        # After OMP_NUM_THREADS, which the user may have set; before what the ranks are given.
        **without_launch(os.environ),
        **{name: str(value) for name, value in given.items()},
    }


def _wait(
    workers: Sequence[Worker], stop: StopRequest, grace_s: float
) -> tuple[str, signal.Signals | None]:
    """Until no rank is left. Returns what went wrong, in words, and the signal that ranks did not
    answer in time; nothing if all was well.
    """
    passed_on = False
    unanswered: signal.Signals | None = None
    first: Worker | None = None
    deadline, why = float("inf"), ""
    while running := [worker for worker in workers if worker.is_running]:
        now = time.monotonic()
        if stop.received is not None and not passed_on:
            passed_on = True
            for worker in running:
                worker.signal(stop.received)
            deadline, unanswered = now + grace_s, stop.received
            why = f"did not leave within --grace_s {grace_s:g} after {stop.received.name}"
        ended = [worker for worker in workers if worker.process.returncode]
        # Ranks that leave with 0 have all met before; the main rank may still be publishing.
        if first is None and ended:
            # Of several that ended between two looks, one that died of a signal (a negative code)
            # is the cause.
            first = min(ended, key=lambda w: w.process.returncode)
            if not is_well(first.process.returncode) and now + PEERS_S < deadline:
                deadline, why = now + PEERS_S, f"did not leave within {PEERS_S:g} s after {first}"
                unanswered = None
        if now > deadline:
            for worker in running:
                worker.kill()
            names = [worker.rank for worker in running]
            return f"ranks {names} {why}, and were killed.", unanswered
        time.sleep(POLL_S)
    failed = _verdict([worker.process.returncode for worker in workers]) == FAILED
    return "" if not failed or first is None else f"{first} first.{first.hint}", None


@contextlib.contextmanager
def _pipe() -> Iterator[int]:
    """The reading end of a pipe; it reads as ended once this process is."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _verdict(codes: Sequence[int]) -> int:
    found = set(codes)
    if all(map(is_well, found)):
        return PREEMPTED if PREEMPTED in found else DONE
    if found <= {DONE, NOT_PUBLISHED}:
        return NOT_PUBLISHED
    return WRONG_INPUT if found == {WRONG_INPUT} else FAILED
