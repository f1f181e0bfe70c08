"""What users of such systems tripped over, each by the smallest input that shows it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    DamagedCheckpoint,
    Manifest,
    RunFolder,
    StateMismatch,
    load_weights,
    newest_intact,
    read_manifest,
    read_start,
    resolve_checkpoint,
    restore,
    save_weights,
)
from parallel_ckpt import ranks as _ranks
from parallel_ckpt.convert import convert
from parallel_ckpt.inspect import inspect
from parallel_ckpt.save import rank_files as writing
from parallel_ckpt.save import safetensors as weights
from parallel_ckpt.verify import verify
from parallel_config import CheckpointConfig, CheckpointFormat, Topology, is_agreed
from parallel_testing.ranks import rank_outcomes, run_ranks

ONE, TWO = Topology(), Topology(dp_shard=2)


def build(size: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, sharded where there are ranks, and an optimizer."""
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, size: int = 8) -> float:
    generator = torch.Generator().manual_seed(number)
    loss = model(torch.randn(4, size, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def quiet(note: str) -> None:
    """Where notes of a saver go."""


# A gather that only the main rank calls


def call_on_main_alone(call: str, root: Path) -> str:
    model, optimizer = build()
    saver = CheckpointSaver(root / "run", topology=TWO, on_note=quiet)
    saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    _ranks.ENTRY_S = 2.0
    calls = {
        "save": lambda: saver.save(step=2, samples_seen=0, model=model, optimizer=optimizer),
        "save_weights": lambda: save_weights(model, root / "exported"),
        "restore": lambda: restore(root / "run", model, optimizer),
        "load_weights": lambda: load_weights(model, root / "run"),
    }
    begin = time.monotonic()
    message = ""
    if dist.get_rank() == 0:
        try:
            calls[call]()
        except CheckpointError as error:
            message = str(error)
        assert time.monotonic() - begin < 15
    if dist.get_rank() == 1:
        time.sleep(5)  # busy with something else for longer than anyone waits
    return message


@pytest.mark.parametrize("call", ["save", "save_weights", "restore", "load_weights"])
def test_a_collective_call_that_one_rank_makes_alone_is_told(call: str, tmp_path: Path) -> None:
    outcomes = rank_outcomes(call_on_main_alone, 2, call, tmp_path, timeout_s=60)
    assert outcomes[0].exit_code is not None, outcomes[0].error
    message = str(outcomes[0].result)
    who = "ranks [1]" if call == "save" else "another rank"
    words = f"was not made by {who} within 2 s. Every rank makes this call"
    assert words in message, outcomes[0].error


# What only the main rank uses


def hear_of_plans(root: Path) -> tuple[list[str], list[int], list[str]]:
    """Kinds of plans that this rank was sent, results that it got, and what it was told."""
    heard: list[str] = []

    def hear(self: object, state: dict[str, Any]) -> None:
        heard.append(type(self).__name__)
        vars(self).update(state)

    for kind in (writing.Own, weights.Box, Manifest):
        kind.__setstate__ = hear
    model, optimizer = build()
    train(model, optimizer, 0)
    topology = Topology(dp_shard=3)
    with CheckpointSaver(root, topology=topology, on_note=quiet) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    newest_intact(root)
    ranks = _ranks.all_ranks()
    got = ranks.attempt_for_main(lambda: 10 * ranks.rank)
    told = []
    for call in (ranks.attempt_for_main, ranks.on_main):
        try:
            call(lambda: [][0] if ranks.rank != 1 else 0)
        except CheckpointError as error:
            told.append(str(error))
    return heard, got, told


def test_an_error_of_one_process_alone_is_agreed_with_nobody() -> None:
    """Its engine would not tell the peers, who wait for it."""
    alone = _ranks.Ranks()
    for call in (alone.attempt, alone.attempt_all, alone.attempt_for_main, alone.on_main):
        with pytest.raises(CheckpointError, match="IndexError") as failed:
            call(lambda: [][0])
        assert not is_agreed(failed.value)


def test_a_rank_is_sent_what_it_uses_and_every_rank_hears_of_an_error(tmp_path: Path) -> None:
    outcomes = run_ranks(hear_of_plans, 3, tmp_path)
    (heard, got, told), *others = outcomes
    assert heard.count("Own") == 3
    assert heard.count("Box") == 3 * 4
    assert got == [0, 10, 20]
    assert told == 2 * ["rank 0 failed: IndexError: list index out of range"]
    for heard, got, also_told in others:
        assert heard == ["Manifest"]
        assert got == []
        assert also_told == told


# The link to the newest checkpoint


def test_last_leads_to_a_whole_checkpoint_at_every_moment(tmp_path: Path) -> None:
    model, optimizer = build()
    problems: list[str] = []
    seen: set[str] = set()
    done = threading.Event()
    last = tmp_path / "checkpoints/last"

    def poll() -> None:
        while not done.is_set():
            try:
                name = os.readlink(last)
                with open(last / "manifest.json", encoding="utf-8") as file:
                    json.load(file)
                seen.add(name)
            except (OSError, ValueError) as error:
                problems.append(repr(error))
            time.sleep(0.0005)

    with CheckpointSaver(tmp_path, topology=ONE, on_note=quiet) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
        thread = threading.Thread(target=poll)
        thread.start()
        for step in range(2, 22):
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
        done.set()
        thread.join()
    assert not problems
    assert len(seen) > 5


def test_a_last_that_leads_nowhere_is_set_right(tmp_path: Path) -> None:
    model, optimizer = build()
    with CheckpointSaver(tmp_path, topology=ONE, on_note=quiet) as saver:
        for step in (2, 1):  # taken up again from before 2
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
    last = tmp_path / "checkpoints/last"
    last.unlink()
    last.symlink_to("000009")
    assert resolve_checkpoint(tmp_path).name == "000001"
    assert resolve_checkpoint(last).name == "000001"
    notes: list[str] = []
    CheckpointSaver(tmp_path, topology=ONE, on_note=notes.append).close()
    assert os.readlink(last) == "000001"
    assert "pointed at nothing" in notes[0]


# A disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 kB, mounted for this test alone."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here; RLIMIT_FSIZE stands in elsewhere")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_the_disk(run: Path, form: CheckpointFormat) -> list[str]:
    """Save until the disk is full; what each rank was told."""
    model, optimizer = build(64)
    train(model, optimizer, 0, 64)
    told = []
    with CheckpointSaver(run, topology=TWO, checkpoint_format=form, on_note=quiet) as saver:
        for step in range(1, 8):
            begin = time.monotonic()
            try:
                saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
            except CheckpointError as error:
                told.append(f"{step} {error}{'' if is_agreed(error) else ' (on one rank)'}")
            assert time.monotonic() - begin < 30
    return told


@pytest.mark.parametrize("form", CheckpointFormat)
def test_a_full_disk_is_told_on_every_rank_and_costs_no_checkpoint(
    form: CheckpointFormat, small_disk: Path
) -> None:
    told = run_ranks(fill_the_disk, 2, small_disk / "run", form)
    assert told[0] == told[1]
    assert told[0]
    assert all("No space left on device" in line for line in told[0])
    assert "on one rank" not in str(told)  # no engine tells anybody of it once more
    folder = RunFolder(small_disk / "run")
    steps = folder.committed_steps()
    assert steps
    assert not folder.hidden_folders()
    assert not {int(line.split()[0]) for line in told[0]} & set(steps)
    for step in steps:
        assert verify(folder.step(step).path).ok
    assert os.readlink(folder.last) == f"{steps[-1]:06d}"


def refuse_the_main_rank(run: Path, where: str) -> str:
    """The main rank alone may not write where only it writes."""
    model, optimizer = build()
    with CheckpointSaver(run, topology=TWO, on_note=quiet) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
        if dist.get_rank() == 0 and where == "checkpoints":
            os.chmod(run / "checkpoints", 0o500)
            os.seteuid(65534)
        files = {"config.json": ""} if where == "checkpoints" else {300 * "x": ""}
        try:
            saver.save(step=2, samples_seen=0, model=model, optimizer=optimizer, model_files=files)
        except CheckpointError as error:
            return str(error)
        finally:
            os.seteuid(os.getuid())
    return ""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("checkpoints", "failed on rank 0: Permission denied"),
        ("name", "failed on rank 0: File name too long"),
    ],
)
def test_an_error_where_only_the_main_rank_writes(where: str, words: str, tmp_path: Path) -> None:
    if where == "checkpoints" and os.geteuid() != 0:
        pytest.skip("only root can give up a right and take it back")
    told = run_ranks(refuse_the_main_rank, 2, tmp_path, where)
    os.chmod(tmp_path / "checkpoints", 0o700)
    assert words in told[0]
    assert told[0] == told[1]
    assert RunFolder(tmp_path).committed_steps() == [1]
    assert not RunFolder(tmp_path).hidden_folders()


# A moment that is missing


def test_a_missing_moment_is_an_error_and_no_zero(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, 0)
    with CheckpointSaver(tmp_path, topology=ONE, on_note=quiet) as saver:
        path = saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    index = path / "training_state/optimizer.json"
    text = index.read_text()
    assert '"exp_avg"' in text
    other, fresh = build()
    before = [p.clone() for p in other.parameters()]
    index.write_text(text.replace('"exp_avg"', '"exp_avg_old"', 1))
    with pytest.raises(StateMismatch) as caught:
        restore(tmp_path, other, fresh)
    lines = str(caught.value).splitlines()
    assert any("exp_avg_old is listed in the index but its tensor is missing" in x for x in lines)
    assert any("exp_avg is stored but not listed in the index" in line for line in lines)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert not fresh.state


# Files that the manifest does not know


def saved(run: Path, form: CheckpointFormat) -> tuple[nn.Module, Path]:
    model, optimizer = build()
    train(model, optimizer, 0)
    with CheckpointSaver(run, topology=ONE, checkpoint_format=form, on_note=quiet) as saver:
        path = saver.save(
            step=1, samples_seen=0, model=model, optimizer=optimizer, train_config="{}"
        )
    return model, path


@pytest.mark.parametrize("form", CheckpointFormat)
@pytest.mark.parametrize("name", ["model-old.safetensors", "model.safetensors", "model"])
def test_a_file_that_was_never_committed_is_read_by_nothing(
    name: str, form: CheckpointFormat, tmp_path: Path
) -> None:
    model, path = saved(tmp_path / "run", form)
    folder = path / "pretrained_model"
    if (folder / name).exists():
        name = "model-00001-of-00002.safetensors"
    zeros = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    if name == "model":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "y"}}')
        name += ".safetensors.index.json"
    else:
        save_file(zeros, folder / name)
    before = inspect(path).to_plain()
    read_start(path, topology=ONE)
    assert verify(path).unlisted == (f"pretrained_model/{name}",)
    other, fresh = build()
    restore(path, other, fresh)
    assert torch.equal(other[1].weight, model[1].weight)
    for given in (tmp_path / "run", path, folder, folder / "dcp"):
        if given.exists():
            load_weights(other := build()[0], given)
            assert torch.equal(other[1].weight, model[1].weight), given
    convert(path, tmp_path / "out")
    load_weights(other := build()[0], tmp_path / "out")
    assert torch.equal(other[1].weight, model[1].weight)
    (folder / name).unlink()
    assert inspect(path).to_plain() == before


@pytest.mark.parametrize(
    ("gone", "is_told"),
    [
        ("pretrained_model/dcp/.metadata", True),
        ("pretrained_model/dcp/__0_0.distcp", True),
        ("training_state/optimizer/.metadata", True),
        ("training_state/optimizer/__0_0.distcp", True),
        ("training_state/optimizer.json", True),
        ("training_state/training_step.json", True),
        ("training_state/data.json", True),
        ("training_state/rng/rank_00000.safetensors", True),
        ("pretrained_model/train_config.json", False),
    ],
)
def test_a_file_that_the_manifest_lost_is_not_read(
    gone: str, is_told: bool, tmp_path: Path
) -> None:
    _, path = saved(tmp_path, CheckpointFormat.DCP)
    document = json.loads((path / "manifest.json").read_text())
    document["files"] = [record for record in document["files"] if record["path"] != gone]
    (path / "manifest.json").write_text(json.dumps(document))
    told = pytest.raises(DamagedCheckpoint, match=r"is needed, but manifest\.json does not list it")
    with told if is_told else contextlib.nullcontext():
        start = read_start(path, topology=ONE)
        assert is_told or start.train_config is None
        restore(path, *build())


# Names of folders


@pytest.mark.parametrize(
    "name",
    [
        "optimizer_sweep/pytorch_model_fsdp_test/run 1",
        "training_state/pretrained_model/dcp",
        "checkpoints/last",
        "ünï [1] {x}*?",
        "-leading",
        "trailing.",
        "000500",
        "model.safetensors",
    ],
)
@pytest.mark.parametrize("given", [str, Path])
def test_any_name_of_a_run(name: str, given: type, tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "real" / name, tmp_path / "linked"
    run.parent.mkdir(parents=True)
    elsewhere.symlink_to(tmp_path / "real")
    model, optimizer = build()
    train(model, optimizer, 0)
    with CheckpointSaver(
        given(elsewhere / name),
        topology=ONE,
        checkpoint_format=CheckpointFormat.DCP,
        on_note=quiet,
    ) as saver:
        saver.save(step=5, samples_seen=0, model=model, optimizer=optimizer)
    for path in (run, elsewhere / name, run / "checkpoints/last", run / "checkpoints/000005"):
        start = read_start(given(path), topology=ONE)
        assert start.path == (run / "checkpoints/000005").resolve()
        other, fresh = build()
        restore(given(path), other, fresh)
        assert torch.equal(other[0].weight, model[0].weight)
    convert(given(run), given(tmp_path / f"out {name.replace('/', '-')}"))
    load_weights(build()[0], given(tmp_path / f"out {name.replace('/', '-')}"))


# Load right after saving, again and again


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def save_and_load_in_turn(run: Path) -> list[tuple[list[float], list[float]]]:
    model, optimizer = build()
    pairs = []
    config = CheckpointConfig(keep_last=2)
    form = CheckpointFormat.SAFETENSORS_DCP
    counts, threads = [], []
    with CheckpointSaver(
        run, topology=TWO, config=config, checkpoint_format=form, on_note=quiet
    ) as saver:
        for cycle in range(20):
            path = saver.save(step=cycle, samples_seen=0, model=model, optimizer=optimizer)
            first = [train(model, optimizer, 10 * cycle + k) for k in range(2)]
            read_start(path, topology=TWO)
            restore(path, model, optimizer)
            pairs.append((first, [train(model, optimizer, 10 * cycle + k) for k in range(2)]))
            counts.append(open_files())
            threads.append(threading.active_count())
    assert max(counts[3:]) == counts[3], counts
    assert max(threads[3:]) == threads[3], threads
    assert len(list((run / "checkpoints").iterdir())) == 3
    return pairs


def test_loading_right_after_saving_gives_the_same_steps_and_leaves_nothing(tmp_path: Path) -> None:
    for pairs in run_ranks(save_and_load_in_turn, 2, tmp_path / "run"):
        assert len(pairs) == 20
        for first, again in pairs:
            assert first == again


# Streams of fewer ranks


def draw(run: Path, world_size: int) -> float:
    topology = Topology(dp_replicate=world_size)
    if world_size == 3:
        model = nn.Linear(2, 2)
        with CheckpointSaver(run, topology=topology, on_note=quiet) as saver:
            saver.save(step=1, samples_seen=0, model=model)
    start = read_start(run, topology=topology)
    assert bool(start.notes) == (world_size != 3)
    start.restore_rng()
    return float(torch.rand(()))


def test_fewer_ranks_than_saved_get_streams_of_their_own(tmp_path: Path) -> None:
    run_ranks(draw, 3, tmp_path, 3)
    two = run_ranks(draw, 2, tmp_path, 2)
    assert len(set(two)) == 2
    assert two == run_ranks(draw, 2, tmp_path, 2)
    with contextlib.chdir(tmp_path):
        assert read_manifest_world(Path()) == 3


def read_manifest_world(run: Path) -> Any:
    from parallel_ckpt import StepFolder

    return read_manifest(StepFolder(resolve_checkpoint(run))).topology.world_size


def save_while_gathered(folder: Path) -> bool:
    """After a forward without a backward FSDP2's root holds gathered parameters."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Linear(7, 5), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 7))
    assert not isinstance(model.weight, DTensor)
    topology = Topology(dp_shard=2)
    with CheckpointSaver(folder, topology=topology) as saver:
        path = saver.save(step=1, samples_seen=2, model=model, optimizer=optimizer)
    with torch.no_grad():
        model(torch.ones(2, 7))
    restored = restore(path, model, optimizer)
    return isinstance(model.weight, DTensor) and restored.num_optimizer_entries == 6


def test_a_model_that_is_gathered_at_the_moment_is_saved_and_restored(tmp_path: Path) -> None:
    assert run_ranks(save_while_gathered, 2, tmp_path) == [True, True]
