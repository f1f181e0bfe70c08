"""How a checkpoint is found by any of its names, and which files lie in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from parallel_ckpt import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointSaver,
    newest_intact,
    read_start,
    resolve_checkpoint,
)
from parallel_config import CheckpointFormat
from small_runs import ONE, read_manifest_of, save_two, saver_of, small, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two(tmp_path_factory.mktemp("runs") / "optimizer_sweep" / "run 1 [ü]")


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
