"""Killed at any moment, out of space, not allowed: what was committed stays, and nothing hangs."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_ckpt import CheckpointSaver, RunFolder, newest_intact, read_start, restore
from parallel_config import CheckpointConfig, CheckpointFormat, Topology
from parallel_testing.ranks import RankOutcome, rank_outcomes, run_ranks

FORMAT = CheckpointFormat.SAFETENSORS_DCP
WATCHDOG_S = 300
"""A busy machine takes its time to start ranks; a hang is over after this anyway."""


def build(value: float, *, shard: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and a moment that both hold `value` everywhere."""
    model = nn.Linear(16, 8)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        assert isinstance(model.weight, DTensor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return model, optimizer


def save(saver: CheckpointSaver, step: int, value: float, *, shard: bool = False) -> None:
    model, optimizer = build(value, shard=shard)
    saver.save(step=step, samples_seen=step, model=model, optimizer=optimizer, data_state=value)


def value_of(path: Path, topology: Topology = Topology()) -> float:  # noqa: B008 - frozen
    """The one value that everything in a checkpoint holds."""
    start = read_start(path, topology=topology)
    model, optimizer = build(-1.0)
    restore(path, model, optimizer)
    held = {v for p in model.parameters() for v in p.detach().flatten().tolist()}
    state = [optimizer.state[p]["momentum_buffer"].flatten().tolist() for p in model.parameters()]
    held |= {v for of_parameter in state for v in of_parameter}
    assert held == {start.data_state}
    return float(start.data_state)


def open_saver(root: Path, **config: Any) -> CheckpointSaver:
    return CheckpointSaver(
        root,
        topology=Topology(),
        checkpoint_format=FORMAT,
        config=CheckpointConfig(**config),
        on_note=lambda note: None,
    )


def die_at(event_number: int, root: Path) -> None:
    """SIGKILL this process before its n-th change to the run folder."""
    changes = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link"}
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        is_write = event == "open" and isinstance(args[1], str) and args[1][0] in "wx"
        if (event in changes or is_write) and any(str(root) in str(arg) for arg in args):
            count += 1
            if count == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_at_every_change(root: Path) -> int:
    """Runs in a process of its own; how many moments of dying there were."""
    origin = root / "origin"
    with open_saver(origin) as saver:
        save(saver, 1, 1.0)
        save(saver, 2, 2.0)
    moment = 0
    while True:
        moment += 1
        run = root / "run"
        shutil.copytree(origin, run, symlinks=True)
        pid = os.fork()
        if pid == 0:
            die_at(moment, run)
            with open_saver(run, keep_last=2) as saver:
                save(saver, 2, 2.5)
                save(saver, 3, 3.0)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        check_after_death(run)
        shutil.rmtree(run)
        if status == 0:
            return moment
        assert os.WTERMSIG(status) == signal.SIGKILL


def check_after_death(run: Path) -> None:
    allowed = {1: {1.0}, 2: {2.0, 2.5}, 3: {3.0}}
    folder = RunFolder(run)
    for step in folder.committed_steps():  # as another process sees it, before anyone mends
        assert value_of(folder.step(step).path) in allowed[step]
    with open_saver(run) as saver:
        assert not folder.hidden_folders()
        path, skipped = newest_intact(run)
        assert path is not None
        assert not skipped
        assert path.name in ("000002", "000003")
        assert value_of(run / "checkpoints/last") in (2.0, 2.5, 3.0)
        save(saver, 4, 4.0)
    assert value_of(run) == 4.0
    names = {entry.name for entry in folder.checkpoints.iterdir()}
    assert names <= {"000001", "000002", "000003", "000004", "last"}
    assert not list(run.glob(".run.lock*"))


def test_killed_before_every_change_to_the_folder(tmp_path: Path) -> None:
    moments = run_ranks(killed_at_every_change, 1, tmp_path, init=False, timeout_s=300)[0]
    assert moments > 60


def save_until_killed(
    root: Path, victims: list[int], moment: float, first: int, async_save: bool
) -> None:
    """Two sharded ranks save again and again; the victims die after `moment` times one save."""
    rank = dist.get_rank()
    with CheckpointSaver(
        root,
        topology=Topology(dp_shard=2),
        checkpoint_format=FORMAT,
        config=CheckpointConfig(keep_last=3, async_save=async_save),
        on_note=lambda note: None,
        deadline_s=60,
    ) as saver:
        save(saver, first, float(first), shard=True)  # imports are done before the clock runs
        saver.wait()
        begin = time.monotonic()
        save(saver, first + 1, float(first + 1), shard=True)
        saver.wait()
        if rank in victims:
            # A signal that no handler can see or delay, as from the kernel's memory killer.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, moment * (time.monotonic() - begin))
        for step in range(first + 2, first + 200):
            save(saver, step, float(step), shard=True)


@dataclass
class Tally:
    """What a campaign has seen."""

    newest: int = 0
    deaths: int = 0
    saves: int = 0
    """Committed."""
    leftovers: int = 0
    """Folders of saves that were cut off."""


def campaign(
    root: Path,
    trials: int,
    seed: int = 0,
    on_trial: Callable[[int, Tally], None] = lambda number, tally: None,
) -> Tally:
    """Kill one rank or both at random moments of saving; what is there then is whole."""
    generator = torch.Generator().manual_seed(seed)
    tally = Tally()
    for trial in range(trials):
        victims = [[0], [1], [0, 1]][trial % 3]
        moment = 0.02 + 3 * float(torch.rand((), generator=generator))
        # Three trials kill each set of victims and save in both ways; six do every combination.
        arguments = (root, victims, moment, tally.newest + 1, trial % 2 == 1)
        outcomes = rank_outcomes(save_until_killed, 2, *arguments, timeout_s=WATCHDOG_S)
        check_deaths(outcomes, victims)
        tally.deaths += len(victims)
        tally.leftovers += len(RunFolder(root).hidden_folders())
        path, skipped = newest_intact(root)
        assert not skipped
        assert path is not None
        step = int(path.name)
        assert step > tally.newest
        assert value_of(path, Topology(dp_shard=2)) == step
        tally.saves += step - tally.newest
        tally.newest = step
        on_trial(trial + 1, tally)
    return tally


def check_deaths(outcomes: list[RankOutcome], victims: list[int]) -> None:
    for outcome in outcomes:
        assert outcome.exit_code is not None, f"rank {outcome.rank} hung\n{outcome.error}"
        expected = -signal.SIGALRM if outcome.rank in victims else 1
        assert outcome.exit_code == expected, (
            f"rank {outcome.rank} ended with {outcome.exit_code}, not {expected}; victims "
            f"{victims}\n{outcome.error}"
        )


def test_ranks_killed_at_random_moments(tmp_path: Path) -> None:
    assert campaign(tmp_path, trials=3).newest > 0


def save_with_a_limit(root: Path, limited: int, how: str, async_save: bool) -> str:
    """Rank `limited` meets a real error of the file system in its second save."""
    rank = dist.get_rank()
    saver = CheckpointSaver(
        root,
        topology=Topology(dp_shard=2),
        checkpoint_format=FORMAT,
        config=CheckpointConfig(async_save=async_save),
    )
    save(saver, 1, 1.0, shard=True)
    saver.wait()
    if rank == limited and how == "too large":
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, resource.RLIM_INFINITY))
    if rank == limited and how == "not allowed":
        os.seteuid(65534)
    message = ""
    try:
        save(saver, 2, 2.0, shard=True)
        saver.wait()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    if rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        os.seteuid(os.getuid())
    hidden = RunFolder(root).hidden_folders() if rank == 0 and how == "too large" else []
    save(saver, 3, 3.0, shard=True)
    saver.close()
    assert not hidden
    return message


FAILURES = [
    ("too large", 1, False, "failed on rank 1: File too large"),
    ("too large", 0, False, "failed on rank 0: File too large"),
    ("too large", 1, True, "failed on rank 1: File too large"),
    ("not allowed", 1, False, "failed on rank 1: Permission denied"),
]


def meet_every_failure(root: Path) -> list[str]:
    """What this rank is told in each of `FAILURES`, one after another."""
    return [
        save_with_a_limit(root / str(number), limited, how, async_save)
        for number, (how, limited, async_save, _) in enumerate(FAILURES)
        if how != "not allowed" or os.geteuid() == 0  # only root can give up a right and retake it
    ]


def test_an_error_of_one_rank_is_the_error_of_all(tmp_path: Path) -> None:
    told, also_told = run_ranks(meet_every_failure, 2, tmp_path)
    assert told == also_told
    assert len(told) >= 3
    for number, message in enumerate(told):
        assert FAILURES[number][3] in message
        assert message.startswith("CheckpointError")
        assert value_of(tmp_path / str(number), Topology(dp_shard=2)) == 3.0
        assert RunFolder(tmp_path / str(number)).committed_steps() == [1, 3]


ARTIFACTS = [
    "manifest.json",
    "pretrained_model/model.safetensors",
    "pretrained_model/dcp/.metadata",
    "pretrained_model/dcp/__0_0.distcp",
    "training_state/optimizer/.metadata",
    "training_state/optimizer/__0_0.distcp",
    "training_state/optimizer.json",
    "training_state/training_step.json",
    "training_state/scheduler.json",
    "training_state/data.json",
    "training_state/rng/rank_00000.safetensors",
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("healthy") / "run"
    with open_saver(root) as saver:
        save(saver, 1, 1.0)
        save(saver, 2, 2.0)
    return root


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_damage_is_found_and_named(artifact: str, how: str, healthy: Path, tmp_path: Path) -> None:
    run = shutil.copytree(healthy, tmp_path / "run", symlinks=True)
    file = run / "checkpoints/000002" / artifact
    content = file.read_bytes()
    if how == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 0x40]) + content[middle + 1 :])
    elif how == "truncated":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    if artifact == "manifest.json" and how == "truncated":
        return  # its last byte is a line feed: nothing is lost
    with pytest.raises(ValueError) as caught:
        read_start(run / "checkpoints/000002", topology=Topology())
    assert artifact in str(caught.value) or how == "missing"
    path, skipped = newest_intact(run)
    assert path == run / "checkpoints/000001"
    if not (artifact == "manifest.json" and how == "missing"):
        assert [entry[0].name for entry in skipped] == ["000002"]
        assert artifact in skipped[0][1]
    assert value_of(path) == 1.0
    with open_saver(run) as saver:
        save(saver, 2, 2.5)
    assert value_of(run) == 2.5


def test_sizes_alone_find_what_is_cut(healthy: Path, tmp_path: Path) -> None:
    run = shutil.copytree(healthy, tmp_path / "run", symlinks=True)
    file = run / "checkpoints/000002/pretrained_model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"has \d+ bytes; \d+ were committed"):
        read_start(run, topology=Topology(), verify="fast")


if __name__ == "__main__":
    import tempfile

    import conftest  # noqa: F401 - ranks then start with everything imported

    with tempfile.TemporaryDirectory() as folder:
        number, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0

        def report(trial: int, tally: Tally) -> None:
            if trial % 20 == 0 or trial == number:
                print(f"{trial} of {number} trials, seed {seed}: {tally}", flush=True)

        campaign(Path(folder), number, seed, report)
