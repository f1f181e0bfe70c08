"""A resume goes on where the save was: any name of a run, other ranks, gathered models."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_ckpt import (
    CheckpointSaver,
    StateMismatch,
    load_weights,
    newest_intact,
    read_start,
    restore,
)
from parallel_ckpt.convert import convert
from parallel_ckpt.formats.checked_json import parse_json
from parallel_config import CheckpointConfig, CheckpointFormat, Topology
from parallel_testing.ranks import run_ranks
from small_runs import ONE, build, change_manifest, quiet, train_on

TWO = Topology(dp_shard=2)


def test_a_missing_moment_is_an_error_and_no_zero(tmp_path: Path) -> None:
    model, optimizer = build()
    train_on(model, optimizer, 0)
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
    train_on(model, optimizer, 0)
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
            first = [train_on(model, optimizer, 10 * cycle + k) for k in range(2)]
            read_start(path, topology=TWO)
            restore(path, model, optimizer)
            pairs.append((first, [train_on(model, optimizer, 10 * cycle + k) for k in range(2)]))
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


def gradients_without_a_sync(folder: Path) -> list[bool]:
    """FSDP2 keeps them apart from `.grad`, and adds them to the next backward with a sync."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for number, (sharding, degrees) in enumerate(
        (
            (mesh, {"dp_replicate": 2, "dp_shard": 2}),
            (init_device_mesh("cpu", (4,)), {"dp_shard": 4}),
        )
    ):
        model = fully_shard(nn.Linear(8, 4), mesh=sharding)
        assert isinstance(model.weight, DTensor)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with CheckpointSaver(folder / f"{number}", topology=Topology(**degrees)) as saver:
            path = saver.save(step=1, samples_seen=2, model=model, optimizer=optimizer)
        gradients = []
        for left in ((), ("sync",), ("all_reduce",)):
            # Nothing left, whole gradients, and (under HSDP) sums that wait for the replicas.
            for kind in left:
                model.set_requires_gradient_sync(False) if kind == "sync" else None
                model.set_requires_all_reduce(False) if kind == "all_reduce" else None
                model(torch.full((2, 8), 3.0)).sum().backward()
                model.set_requires_gradient_sync(True)
                model.set_requires_all_reduce(True)
            notes = restore(path, model, optimizer).notes
            assert ("are dropped" in "".join(notes)) == bool(left), (left, notes)
            model(torch.ones(2, 8)).sum().backward()
            gradients.append(model.weight.grad.full_tensor())
            optimizer.zero_grad()
        found += [torch.equal(gradients[0], later) for later in gradients[1:]]
    return found


def test_gradients_that_wait_for_a_sync_do_not_join_a_restored_model(tmp_path: Path) -> None:
    assert run_ranks(gradients_without_a_sync, 4, tmp_path) == [[True] * 4] * 4


def test_a_model_that_is_gathered_at_the_moment_is_saved_and_restored(tmp_path: Path) -> None:
    assert run_ranks(save_while_gathered, 2, tmp_path) == [True, True]


def test_a_resume_parses_its_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    with CheckpointSaver(tmp_path / "saved", topology=ONE, on_note=quiet) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    # Elsewhere, so that what the saver has read itself is not counted as read.
    run = shutil.copytree(tmp_path / "saved", tmp_path / "run", symlinks=True)
    parsed: list[Path] = []

    def counted(text: bytes, source: Path) -> dict[str, Any]:
        parsed.append(source)
        return parse_json(text, source)

    monkeypatch.setattr("parallel_ckpt.store.manifest.parse_json", counted)
    path, _ = newest_intact(run)
    assert path is not None
    start = read_start(path, topology=ONE)
    restore(start.path, model, optimizer)
    load_weights(model, start.path, verify="full")
    assert parsed == [path / "manifest.json"]

    change_manifest(path, created_at="later")
    assert read_start(path, topology=ONE).manifest.created_at == "later"
    assert len(parsed) == 2
