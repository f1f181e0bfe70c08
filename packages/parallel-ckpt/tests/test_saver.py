"""The saver and its parts in one process: lock, names, retention, strictness, staging, RNG."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parallel_ckpt import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointSaver,
    DamagedCheckpoint,
    StateMismatch,
    load_weights,
    newest_intact,
    read_manifest,
    read_start,
    resolve_checkpoint,
    restore,
    save_weights,
)
from parallel_ckpt.layout import RunFolder
from parallel_ckpt.state.optimizer import EXECUTION
from parallel_ckpt.state.plain_json import dump_json, load_json
from parallel_ckpt.state.rng import RngState
from parallel_ckpt.store.lock import RunLock
from parallel_ckpt.store.retention import superseded
from parallel_config import CheckpointConfig, CheckpointFormat, Topology
from parallel_testing.ranks import run_ranks

ONE = Topology()


def saver_of(root: Path, **config: Any) -> CheckpointSaver:
    return CheckpointSaver(
        root, topology=ONE, config=CheckpointConfig(**config), on_note=NOTES.append
    )


NOTES: list[str] = []


def small(lr: float = 0.1, weight_decay: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "optimizer_sweep" / "run 1 [ü]"
    model, optimizer = small()
    with saver_of(root) as saver:
        for step in (1, 2):
            train(model, optimizer)
            saver.save(
                step=step,
                samples_seen=8 * step,
                model=model,
                optimizer=optimizer,
                train_config='{"schema_version": 1}',
                model_files={"config.json": "{}", "processors/norm.bin": b"\0\1"},
            )
    return root


def test_every_way_to_name_a_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = run / "checkpoints/000002"
    monkeypatch.chdir(run)
    for form in (
        run,
        f"{run}/",
        run / "checkpoints",
        run / "checkpoints/last",
        f"{run}/checkpoints/last/",
        newest,
        newest / "pretrained_model",
        newest / "pretrained_model/train_config.json",
        newest / "training_state",
        run / "checkpoints/last/pretrained_model/train_config.json",
        "checkpoints/last",
        ".",
    ):
        assert resolve_checkpoint(form) == newest, form
    assert resolve_checkpoint("checkpoints/000001") == run / "checkpoints/000001"
    with pytest.raises(CheckpointNotFound, match=r"neither .*manifest\.json nor a committed step"):
        resolve_checkpoint(run / "checkpoints/000007")


def test_a_moved_run_without_links_and_one_with_a_copied_last(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "moved", symlinks=True)
    (moved / "checkpoints/last").unlink()
    assert resolve_checkpoint(moved).name == "000002"
    (moved / "checkpoints/last").write_text("000001\n")
    assert resolve_checkpoint(moved / "checkpoints/last").name == "000001"
    copied = shutil.copytree(run, tmp_path / "copied", symlinks=False)
    model, optimizer = small()
    with saver_of(copied) as saver:
        saver.save(step=3, samples_seen=0, model=model, optimizer=optimizer)
    assert (copied / "checkpoints/last/manifest.json").is_file()
    assert newest_intact(copied)[0] == copied / "checkpoints/000003"


def test_without_links_last_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "link", refuse)
    model, optimizer = small()
    with saver_of(tmp_path) as saver:
        saver.save(step=5, samples_seen=0, model=model, optimizer=optimizer)
    assert (tmp_path / "checkpoints/last").read_text() == "000005\n"
    assert resolve_checkpoint(tmp_path).name == "000005"


def test_newest_is_what_was_committed_last(run: Path, tmp_path: Path) -> None:
    again = shutil.copytree(run, tmp_path / "again", symlinks=True)
    model, optimizer = small()
    with saver_of(again) as saver:  # taken up again from step 1
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    assert newest_intact(again)[0] == again / "checkpoints/000001"


def test_model_files_lie_beside_the_weights(run: Path) -> None:
    folder = run / "checkpoints/000002/pretrained_model"
    assert (folder / "processors/norm.bin").read_bytes() == b"\0\1"
    assert read_start(run, topology=ONE).train_config == '{"schema_version": 1}'
    paths = [record.path for record in read_manifest_of(run).files]
    on_disk = {
        path.relative_to(run / "checkpoints/000002").as_posix()
        for path in (run / "checkpoints/000002").rglob("*")
        if path.is_file()
    }
    assert set(paths) | {"manifest.json"} == on_disk
    with pytest.raises(CheckpointError, match="model_files"), saver_of(run) as saver:
        saver.save(step=9, samples_seen=0, model=nn.Linear(1, 1), model_files={"../x": ""})


def read_manifest_of(run: Path) -> Any:
    from parallel_ckpt import StepFolder

    return read_manifest(StepFolder(resolve_checkpoint(run)))


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with (
        saver_of(tmp_path),
        pytest.raises(CheckpointError, match=r"is held by process \d+ .* alive"),
    ):
        saver_of(tmp_path)
    saver_of(tmp_path).close()
    assert not list(tmp_path.glob("*run.lock*"))


def write_lock(path: Path, **changes: Any) -> None:
    mine, _ = RunLock.acquire(path)
    mine.release()
    document = {
        "host": mine.holder.host,
        "boot": mine.holder.boot,
        "pid": mine.holder.pid,
        "namespace": mine.holder.namespace,
        "started": mine.holder.started,
        "token": "other",
    }
    document |= changes
    path.write_text(json.dumps({key: v for key, v in document.items() if v is not None}))


def test_a_dead_process_of_this_host_is_taken_over_at_once(tmp_path: Path) -> None:
    write_lock(tmp_path / "run.lock", started="1")
    begin = time.monotonic()
    lock, notes = RunLock.acquire(tmp_path / "run.lock")
    assert time.monotonic() - begin < 1
    assert "taken over" in notes[0]
    lock.release()


@pytest.mark.parametrize(
    "changes",
    [
        {"host": socket.gethostname() + "-other"},
        {"boot": "another machine of the same host name"},
        {"boot": None},
        {"boot": ""},
        {"namespace": "pid:[1]"},
    ],
)
def test_another_machine_is_watched_until_it_is_known_to_be_dead_or_alive(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """No process here has the start time of the holder's, so it would count as gone if local."""
    path = tmp_path / "run.lock"
    write_lock(path, started="1", **changes)
    lock, notes = RunLock.acquire(path, stale_s=0.5)
    assert len(notes) == 1
    lock.release()
    write_lock(path, started="1", **changes)
    beat = threading.Timer(0.3, os.utime, [path])
    beat.start()
    with pytest.raises(CheckpointError, match="which is alive"):
        RunLock.acquire(path, stale_s=5)
    beat.join()


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"pid": "x"}', ""])
def test_a_lock_that_says_nothing_is_watched_too(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text(text)
    lock, notes = RunLock.acquire(path, stale_s=0.5)
    assert "its holder is gone" in notes[0]
    lock.release()


def test_a_lost_lock_stops_the_save(tmp_path: Path) -> None:
    model, optimizer = small()
    with saver_of(tmp_path) as saver:
        lock = tmp_path / "run.lock"
        document = json.loads(lock.read_text()) | {"token": "thief"}
        lock.write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match="was taken over by"):
            saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    assert lock.exists()


def test_retention() -> None:
    steps = {100: 1, 200: 2, 250: 3, 300: 4, 400: 5}
    assert superseded(steps, keep_last=None, keep_every=None) == []
    assert superseded(steps, keep_last=1, keep_every=None) == [100, 200, 250, 300]
    assert superseded(steps, keep_last=1, keep_every=200) == [100, 250, 300]
    assert superseded(steps, keep_last=2, keep_every=None, protected=[100]) == [200, 250]
    taken_up_at_100 = {100: 1, 400: 2, 500: 3, 150: 4, 200: 5}
    assert superseded(taken_up_at_100, keep_last=2, keep_every=None) == [100, 400, 500]


def test_a_run_taken_up_from_an_earlier_step_keeps_what_it_saves(tmp_path: Path) -> None:
    model, _ = small()
    with saver_of(tmp_path) as saver:
        for step in (100, 200, 300, 400, 500):
            saver.save(step=step, samples_seen=0, model=model)
    (tmp_path / "checkpoints/000400/manifest.json").write_text("{")
    for step, kept in ((150, [150, 400, 500]), (200, [150, 200, 400]), (250, [200, 250, 400])):
        with saver_of(tmp_path, keep_last=2) as saver:
            saver.save(step=step, samples_seen=0, model=model)
        assert RunFolder(tmp_path).committed_steps() == kept


def test_old_checkpoints_go_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    model, optimizer = small()
    with saver_of(tmp_path, keep_last=2) as saver:
        for step in (1, 2, 3):
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
    names = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert names == ["000002", "000003", "last"]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_commit_is_told_before_anything_is_deleted(tmp_path: Path, async_save: bool) -> None:
    model, optimizer = small()
    seen: list[tuple[str, list[int]]] = []

    def on_commit(path: Path) -> None:
        seen.append((path.name, RunFolder(tmp_path).committed_steps()))

    config = CheckpointConfig(keep_last=1, async_save=async_save)
    with CheckpointSaver(tmp_path, topology=ONE, config=config, on_commit=on_commit) as saver:
        for step in (1, 2):
            saver.save(step=step, samples_seen=step, model=model, optimizer=optimizer)
    assert seen == [("000001", [1]), ("000002", [1, 2])]
    assert RunFolder(tmp_path).committed_steps() == [2]


@pytest.mark.parametrize("async_save", [False, True])
def test_what_fails_after_the_commit_is_a_note(tmp_path: Path, async_save: bool) -> None:
    model, _ = small()
    notes: list[str] = []

    def on_commit(path: Path) -> None:
        raise RuntimeError("the Hub is down")

    config = CheckpointConfig(keep_last=1, async_save=async_save)
    with CheckpointSaver(
        tmp_path, topology=ONE, config=config, on_note=notes.append, on_commit=on_commit
    ) as saver:
        for step in (2, 3, 1):
            saver.save(step=step, samples_seen=0, model=model)
        saver.wait()
        assert RunFolder(tmp_path).committed_steps() == [1]
        assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoints/000001"
        assert read_manifest_of(tmp_path).sequence == 3
    assert notes[2] == (
        f"{tmp_path}/checkpoints/000001: saved; on_commit failed: RuntimeError: the Hub is down"
    )
    assert len(notes) == 3


def test_a_note_that_nobody_can_be_told_fails_no_save(tmp_path: Path) -> None:
    def closed(*told: Any) -> None:
        raise BrokenPipeError("standard output is closed")

    saver = CheckpointSaver(tmp_path, topology=ONE, on_note=closed, on_commit=closed)
    with saver:
        assert saver.save(step=1, samples_seen=0, model=small()[0]).is_dir()


def test_of_two_that_were_moved_aside_the_later_one_is_put_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for token, samples in (("b", 5), ("a", 7), ("c", 6)):
        with saver_of(tmp_path) as saver:
            saver.save(step=1, samples_seen=samples, model=small()[0])
        run.step(1).path.rename(run.hidden(1, "old", token))
        manifest = run.hidden(1, "old", token) / "manifest.json"
        document = json.loads(manifest.read_text()) | {"sequence": samples}
        manifest.write_text(json.dumps(document))
        if token != "c":
            run.hidden(1, "old", token).rename(tmp_path / token)
    for token in "ab":
        (tmp_path / token).rename(run.hidden(1, "old", token))
    saver_of(tmp_path).close()
    assert read_manifest_of(tmp_path).samples_seen == 7
    assert not run.hidden_folders()


def resave_without_the_right_to_delete(root: Path) -> list[str]:
    """As a user whom the former checkpoint's files do not belong to."""
    notes: list[str] = []
    model, _ = small()
    told = CheckpointSaver(root, topology=ONE, on_note=notes.append)
    with told as saver:
        saver.save(step=1, samples_seen=1, model=model)
    (root / "checkpoints/000001/pretrained_model").chmod(0o500)
    if os.geteuid() == 0:
        for path in (root, *root.rglob("*")):
            os.chown(path, 65534, -1, follow_symlinks=False)
        os.seteuid(65534)
    try:
        for samples in (2, 3):
            with CheckpointSaver(root, topology=ONE, on_note=notes.append) as saver:
                path = saver.save(step=1, samples_seen=samples, model=model)
            assert read_start(path, topology=ONE).samples_seen == samples
    finally:
        os.seteuid(os.getuid())
        for folder in root.glob("checkpoints/.0*/pretrained_model"):
            folder.chmod(0o700)
    return notes


def test_what_cannot_be_deleted_fails_neither_the_save_nor_the_next_start() -> None:
    # No other user may enter pytest's own folder.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        root = Path(folder) / "run"
        after_save, at_start = run_ranks(resave_without_the_right_to_delete, 1, root, init=False)[0]
        assert f"{root}/checkpoints/000001: saved; what it replaced is not removed" in after_save
        assert "Permission denied" in after_save
        assert "left by a save that did not finish, and not removed" in at_start
        saver_of(root).close()
        assert not RunFolder(root).hidden_folders()


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7])
def test_an_integer_of_any_library_is_a_step(step: Any, tmp_path: Path) -> None:
    for async_save in (False, True):
        with saver_of(tmp_path, async_save=async_save) as saver:
            path = saver.save(step=step, samples_seen=step, model=small()[0])
        assert path == tmp_path / "checkpoints/000007"
        start = read_start(path, topology=ONE)
        assert (start.step, start.samples_seen) == (7, 7)


@pytest.mark.parametrize("wrong", [-1, True, 1.0, "1", None, 2**62, np.bool_(True)])
@pytest.mark.parametrize("name", ["step", "samples_seen"])
def test_what_counts_nothing_is_refused(name: str, wrong: Any, tmp_path: Path) -> None:
    with saver_of(tmp_path) as saver:
        with pytest.raises(CheckpointError) as caught:
            saver.save(**{"step": 1, "samples_seen": 1, "model": small()[0], name: wrong})
        assert str(caught.value) == f"{name} = {wrong!r}, but it is an integer from 0 to 2^62 - 1."
        assert not list((tmp_path / "checkpoints").iterdir())


def test_a_manifest_that_no_reader_accepts_is_never_committed(tmp_path: Path) -> None:
    topology = Topology()
    object.__setattr__(topology, "dp_shard", 1.0)
    with (
        CheckpointSaver(tmp_path, topology=topology, on_note=NOTES.append) as saver,
        pytest.raises(CheckpointError, match=r"topology\.dp_shard = 1\.0"),
    ):
        saver.save(step=1, samples_seen=1, model=small()[0])
    assert not list((tmp_path / "checkpoints").iterdir())


def test_no_file_names_the_folder_it_was_written_in(tmp_path: Path) -> None:
    """The writer of torch leaves the absolute path in `.metadata`; a checkpoint may be shared."""
    model, optimizer = small()
    train(model, optimizer)
    saver = CheckpointSaver(
        tmp_path, topology=ONE, checkpoint_format=CheckpointFormat.SAFETENSORS_DCP
    )
    with saver:
        path = saver.save(step=1, samples_seen=1, model=model, optimizer=optimizer)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {".metadata", "manifest.json", "model.safetensors"} <= {file.name for file in files}
    assert [file for file in files if str(tmp_path).encode() in file.read_bytes()] == []


def test_strict_on_names_shapes_and_dtypes(run: Path) -> None:
    bigger = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    before = [p.clone() for p in bigger.parameters()]
    with pytest.raises(StateMismatch) as caught:
        restore(run, bigger)
    lines = str(caught.value).splitlines()
    assert "weights: 0.weight has shape (5, 3), but (4, 3) is stored." in lines
    assert "weights: 2.bias is missing in the checkpoint." in lines
    assert all(torch.equal(a, b) for a, b in zip(before, bigger.parameters(), strict=True))
    with pytest.raises(StateMismatch, match=r"1\.bias is in the checkpoint, but not in"):
        restore(run, nn.Sequential(nn.Linear(3, 4)))
    half = small()[0].to(torch.bfloat16)
    with pytest.raises(StateMismatch, match=r"would lose precision of the stored torch\.float32"):
        restore(run, half)
    load_weights(half, run, allow_cast=True)
    restore(run, small()[0].double())


def test_strict_on_optimizer_groups(run: Path) -> None:
    model, _ = small()
    part = torch.optim.AdamW(model[0].parameters())
    with pytest.raises(StateMismatch, match=r"optimizer: 1\.bias was optimized when it was saved"):
        restore(run, model, part)
    stray = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(StateMismatch, match=r"holds a parameter of shape \(7,\)"):
        restore(run, model, stray)


def test_groups_of_other_rates_cannot_be_joined(tmp_path: Path) -> None:
    model, _ = small()
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    with saver_of(tmp_path) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    with pytest.raises(StateMismatch, match=r"joins the saved groups \[0, 1\]"):
        restore(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5))


def test_overrides_win_and_keep_the_place_on_the_curve(tmp_path: Path) -> None:
    def build(lr: float, horizon: int) -> Any:
        model, optimizer = small(lr=lr, weight_decay=lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / horizon)
        return model, optimizer, schedule

    model, optimizer, schedule = build(0.1, 10)
    for _ in range(5):
        train(model, optimizer)
        schedule.step()
    with saver_of(tmp_path) as saver:
        saver.save(step=5, samples_seen=0, model=model, optimizer=optimizer, scheduler=schedule)
    for keep, lr, decay, next_lr in (
        ((), 0.05, 0.1, 0.04),
        (("lr", "weight_decay"), 0.1, 0.2, 0.08),
    ):
        model, optimizer, schedule = build(0.2, 10)
        restore(tmp_path, model, optimizer, schedule, keep=keep)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
        assert optimizer.param_groups[0]["weight_decay"] == decay
        train(model, optimizer)
        schedule.step()
        assert schedule.get_last_lr() == pytest.approx([next_lr])
    model, optimizer, schedule = build(0.1, 20)
    restore(tmp_path, model, optimizer, schedule, keep=("schedule",))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.75)


COMPUTING: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]


@pytest.mark.parametrize("resumed", COMPUTING)
@pytest.mark.parametrize("saved", COMPUTING)
def test_how_an_optimizer_computes_is_its_own(
    saved: dict[str, Any], resumed: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, _ = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **saved)
    train(model, optimizer, 2)
    with saver_of(tmp_path) as saver:
        saver.save(step=2, samples_seen=0, model=model, optimizer=optimizer)
    train(model, optimizer)
    other, _ = small()
    target = torch.optim.AdamW(other.parameters(), lr=0.5, **resumed)
    own = {key: target.param_groups[0][key] for key in EXECUTION}
    restore(tmp_path, other, target)
    assert {key: target.param_groups[0][key] for key in EXECUTION} == own
    assert target.param_groups[0]["lr"] == 0.1
    train(other, target)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert target.state[other[0].weight]["step"].dtype == torch.float32


def test_groups_that_only_compute_differently_may_be_joined(tmp_path: Path) -> None:
    model, _ = small()
    groups = [
        {"params": model[0].parameters(), "foreach": True},
        {"params": model[1].parameters(), "foreach": False},
    ]
    with saver_of(tmp_path) as saver:
        optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
        train(model, optimizer)
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    restore(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


def test_a_fused_step_counts_in_float32_whatever_was_saved(tmp_path: Path) -> None:
    """Torch counts in its default dtype, except where the kernel counts."""
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer = small()
        train(model.float(), optimizer, 0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[model[0].weight]["step"].dtype == torch.float64
    with saver_of(tmp_path) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    other, _ = small()
    for fused, dtype in ((True, torch.float32), (False, torch.float64)):
        target = torch.optim.AdamW(other.parameters(), fused=fused)
        restore(tmp_path, other, target)
        assert target.state[other[0].weight]["step"].dtype == dtype
        train(other, target)
        assert float(target.state[other[0].weight]["step"]) == 2


@pytest.mark.parametrize(("saved", "given"), [(0.25, torch.tensor(0.5)), (torch.tensor(0.25), 0.5)])
def test_a_rate_stays_the_number_or_the_tensor_that_it_is(
    saved: Any, given: Any, tmp_path: Path
) -> None:
    model, optimizer = small(lr=saved)
    with saver_of(tmp_path) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    other, target = small(lr=given)
    restore(tmp_path, other, target)
    found = target.param_groups[0]["lr"]
    assert type(found) is type(given)
    assert float(found) == 0.25


def schedules(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    lambdas = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer)
    return {
        "none": None,
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        "lambda": lambdas,
        "sequence": torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, lambdas], [3]),
        "longer": torch.optim.lr_scheduler.ChainedScheduler([warmup, warmup, lambdas]),
    }


@pytest.mark.parametrize(
    ("saved", "given", "words"),
    [
        ("none", "cosine", "scheduler was not saved in this checkpoint."),
        ("cosine", "lambda", "scheduler of another kind was saved: lr_lambdas is missing in it."),
        (
            "lambda",
            "sequence",
            "scheduler of another kind was saved: _schedulers is missing in it.",
        ),
        ("sequence", "longer", "scheduler has 3 parts, but 2 were saved."),
    ],
)
def test_a_scheduler_that_does_not_fit_is_told_before_anything_is_changed(
    saved: str, given: str, words: str, tmp_path: Path
) -> None:
    model, optimizer = small()
    train(model, optimizer)
    with saver_of(tmp_path) as saver:
        scheduler = schedules(optimizer)[saved]
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer, scheduler=scheduler)
    other, target = small(lr=0.7)
    scheduler = schedules(target)[given]
    before = [p.clone() for p in other.parameters()]
    rate = target.param_groups[0]["lr"]
    with pytest.raises(StateMismatch) as caught:
        restore(tmp_path, other, target, scheduler)
    assert str(caught.value) == words
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert not target.state
    assert target.param_groups[0]["lr"] == rate


@pytest.mark.parametrize("verify", ["full", "fast", None])
def test_damage_is_found_where_it_is_looked_for(verify: Any, tmp_path: Path) -> None:
    model, optimizer = small()
    with saver_of(tmp_path) as saver:
        path = saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    file = path / "pretrained_model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x40
    file.write_bytes(content)
    calls: list[Any] = [
        lambda: restore(path, model, optimizer, verify=verify),
        lambda: load_weights(model, path, verify=verify),
        lambda: load_weights(model, file, verify=verify),
    ]
    before = [p.clone() for p in model.parameters()]
    for call in calls:
        told = pytest.raises(DamagedCheckpoint, match=r"model\.safetensors has checksum")
        with told if verify == "full" else contextlib.nullcontext():
            call()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same is (verify == "full")
    save_weights(model, tmp_path / "exported")
    load_weights(model, tmp_path / "exported")
    with pytest.raises(CheckpointNotFound):
        load_weights(model, tmp_path / "exported", verify="full")


class Prepared(torch.optim.Optimizer):
    """Wraps an optimizer the way accelerate does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.scaler = optimizer, torch.amp.GradScaler("cpu", init_scale=8.0)


class PreparedSchedule:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler


def test_wrappers_of_model_and_optimizer_leave_no_trace(tmp_path: Path) -> None:
    model, optimizer = small()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    model[0] = checkpoint_wrapper(model[0])
    compiled = torch.compile(model, backend="eager")
    train(compiled, optimizer)
    schedule.step()
    prepared = Prepared(optimizer)
    with saver_of(tmp_path) as saver:
        saver.save(
            step=1,
            samples_seen=2,
            model=compiled,
            optimizer=prepared,
            scheduler=PreparedSchedule(schedule),
        )
    with safe_open(tmp_path / "checkpoints/last/pretrained_model/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    plain, other = small()
    again = torch.optim.lr_scheduler.MultiStepLR(other, [1, 3])
    target = Prepared(other)
    target.scaler.load_state_dict(target.scaler.state_dict() | {"scale": 2.0})
    restore(tmp_path, plain, target, PreparedSchedule(again))
    assert torch.equal(plain[0].weight, model[0].weight)
    assert again.state_dict() == schedule.state_dict()
    assert isinstance(again.milestones, Counter)
    assert target.scaler.state_dict()["scale"] == 8.0


class Misfit(nn.Module):
    def get_extra_state(self) -> Any:
        return object()


def test_what_could_only_be_pickled_is_refused_at_the_first_save(tmp_path: Path) -> None:
    model, optimizer = small()
    with saver_of(tmp_path) as saver:
        with pytest.raises(CheckpointError, match="keeps extra state"):
            saver.save(step=1, samples_seen=0, model=nn.Sequential(Misfit()))
        optimizer.param_groups[0]["hook"] = object()
        with pytest.raises(
            CheckpointError, match=r"optimizer\.groups\[0\]\.hyper\.hook is a object"
        ):
            saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
        with pytest.raises(CheckpointError, match="data_state"):
            saver.save(step=1, samples_seen=0, model=model, data_state={"at": {1, 2}})
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x"], "b": (1, (2,))},
        {1: "int key", "$tuple": "odd key"},
        Counter({3: 2}),
        [float("inf"), -float("inf")],
        1e-300,
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = load_json(dump_json(value, "v"), "v")
    assert found == value
    assert type(found) is type(value)


def test_random_streams_go_on_where_they_were() -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    state = RngState.capture()

    def draw() -> list[float]:
        numpy = [float(np.random.standard_normal()) for _ in range(3)]
        return [*(random.gauss(0, 1) for _ in range(3)), *numpy, float(torch.rand(()))]

    first = draw()
    draw()
    state.restore()
    assert draw() == first


def test_weights_of_every_sort(tmp_path: Path) -> None:
    model = nn.Module()
    model.across = nn.Parameter(torch.randn(6, 8).t())
    model.narrow = nn.Parameter(torch.randn(3).bfloat16())
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("one", torch.tensor(7))
    save_weights(model, tmp_path / "one")
    files = save_weights(model, tmp_path / "many", max_shard_bytes=64)
    assert "model.safetensors.index.json" in files
    for name in ("one", "many"):
        target = nn.Module()
        for key, value in model.state_dict().items():
            target.register_buffer(key, torch.zeros_like(value.contiguous()))
        assert load_weights(target, tmp_path / name) == 5
        for key, value in model.state_dict().items():
            assert torch.equal(target.state_dict()[key], value)
            assert target.state_dict()[key].dtype == value.dtype


def test_a_save_in_flight_keeps_its_values(tmp_path: Path) -> None:
    model, optimizer = small()
    wanted = {}
    with CheckpointSaver(
        tmp_path,
        topology=ONE,
        checkpoint_format=CheckpointFormat.DCP,
        config=CheckpointConfig(async_save=True),
    ) as saver:
        for step in range(1, 6):
            train(model, optimizer)
            wanted[step] = [p.detach().clone() for p in model.parameters()]
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
    for step, expected in wanted.items():
        other, _ = small()
        load_weights(other, tmp_path / f"checkpoints/{step:06d}")
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected, strict=True))


def test_tensors_on_the_host_start_no_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with GPUs, where every rank of a CPU run would hold memory of the first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, optimizer = small()
    with saver_of(tmp_path, async_save=True) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    assert not torch.cuda.is_initialized()


def test_a_failed_background_save_is_heard_of(tmp_path: Path) -> None:
    model, optimizer = small()
    saver = saver_of(tmp_path, async_save=True)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="checkpoints"):
        saver.wait()
    saver.close()


def draw_per_rank(root: Path, world_size: int) -> list[float]:
    import torch.distributed as dist

    topology = Topology(dp_replicate=world_size)
    torch.manual_seed(dist.get_rank())
    model, optimizer = small()
    drawn = []
    if world_size == 2:
        with CheckpointSaver(root, topology=topology) as saver:
            saver.save(step=4, samples_seen=0, model=model, optimizer=optimizer)
            drawn.append(float(torch.rand(())))
        torch.manual_seed(77)
    start = read_start(root, topology=topology)
    assert bool(start.notes) == (world_size != 2)
    start.restore_rng()
    return [*drawn, float(torch.rand(()))]


def test_each_rank_has_its_own_stream_again_and_new_ranks_new_ones(tmp_path: Path) -> None:
    drawn = run_ranks(draw_per_rank, 2, tmp_path, 2)
    assert all(before == after for before, after in drawn)
    more = run_ranks(draw_per_rank, 3, tmp_path, 3)
    assert len({value for of_rank in more for value in of_rank}) == 3
    assert more == run_ranks(draw_per_rank, 3, tmp_path, 3)


def open_unshared(root: Path) -> str:
    import torch.distributed as dist

    try:
        CheckpointSaver(root / str(dist.get_rank()), topology=Topology(dp_replicate=2))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_folder_that_one_rank_does_not_see(tmp_path: Path) -> None:
    """Each rank is given its own folder: what a node-local output_dir amounts to."""
    messages = run_ranks(open_unshared, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "is not shared by rank 1" in messages[0]


def save_other_models(root: Path) -> str:
    import torch.distributed as dist

    model = nn.Linear(3, 2 + dist.get_rank())
    with CheckpointSaver(root, topology=Topology(dp_replicate=2)) as saver:
        try:
            saver.save(step=1, samples_seen=0, model=model)
        except CheckpointError as error:
            return str(error)
    return ""


def test_ranks_that_hold_other_tensors_are_told(tmp_path: Path) -> None:
    messages = run_ranks(save_other_models, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "ranks [1] hold other tensors" in messages[0]
