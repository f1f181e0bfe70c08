"""Whole checkpoints to the Hub and back: in the background, by number, only complete ones."""

import json
import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch

from parallel_ckpt import (
    CheckpointNotFound,
    CheckpointSaver,
    DamagedCheckpoint,
    read_start,
    restore,
)
from parallel_config import CheckpointFormat, Topology
from parallel_publish import (
    CheckpointPusher,
    PublishError,
    fetch_checkpoint,
    fetch_on_main,
    newest_on_hub,
    push_checkpoint_to_hub,
)
from parallel_publish.fetching import on_main_at_leisure
from parallel_publish.target import Target
from parallel_testing.hub import Blob, Fault
from parallel_testing.models import TinyModel
from parallel_testing.ranks import rank_outcomes, run_ranks

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def _trained(seed=0):
    model = TinyModel(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def _update(model, optimizer):
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints whose names sort otherwise than their numbers."""
    model, optimizer = _trained()
    saver = CheckpointSaver(
        tmp_path / "run",
        topology=Topology(),
        checkpoint_format=CheckpointFormat.SAFETENSORS_DCP,
    )
    with saver:
        for step in (999_999, 1_000_000):
            _update(model, optimizer)
            saver.save(step=step, samples_seen=2 * step, model=model, optimizer=optimizer)
    return tmp_path / "run", model, optimizer


def _push_all(run, target):
    for name in ("999999", "1000000"):
        push_checkpoint_to_hub(run / "checkpoints" / name, target)


def test_a_fetched_checkpoint_resumes_bit_for_bit(hub, target, run, tmp_path):
    folder, model, optimizer = run
    hub.create("user/model", private=True)
    _push_all(folder, target)
    assert hub.commits("user/model") == ["Checkpoint of step 999999", "Checkpoint of step 1000000"]
    assert newest_on_hub(target) == (1_000_000, [])
    path = fetch_checkpoint(target, tmp_path / "elsewhere")
    assert path == tmp_path / "elsewhere" / "checkpoints" / "1000000"
    assert [p.name for p in path.parent.iterdir()] == ["1000000"]
    again, its_optimizer = _trained(seed=9)
    start = read_start(path, topology=Topology())
    restore(path, again, its_optimizer)
    assert start.samples_seen == 2_000_000
    _update(model, optimizer)
    _update(again, its_optimizer)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_a_checkpoint_that_is_already_there_is_not_fetched_again(hub, target, run, tmp_path):
    hub.create("user/model")
    _push_all(run[0], target)
    fetch_checkpoint(target, tmp_path / "elsewhere")
    before = len(hub.requests_to("/resolve/.*safetensors", "GET"))
    fetch_checkpoint(target, tmp_path / "elsewhere")
    assert len(hub.requests_to("/resolve/.*safetensors", "GET")) == before


def test_an_incomplete_checkpoint_is_skipped(hub, target, run, tmp_path):
    repo = hub.create("user/model")
    _push_all(run[0], target)
    files = dict(repo.at("main").files)
    del files["checkpoints/1000000/training_state/training_step.json"]
    files["checkpoints/2000000/training_state/data.json"] = Blob(b"{}", False)
    files["checkpoints/0777/manifest.json"] = Blob(b"{}", False)
    repo.commit("somebody tidied up", files)
    step, skipped = newest_on_hub(target)
    assert step == 999_999
    assert skipped == [
        "user/model: checkpoint 1000000 does not hold training_state/training_step.json as its "
        "manifest lists it"
    ]
    assert fetch_checkpoint(target, tmp_path / "elsewhere").name == "999999"


def test_a_flipped_bit_on_the_hub_is_found(hub, target, run, tmp_path):
    repo = hub.create("user/model")
    _push_all(run[0], target)
    files = dict(repo.at("main").files)
    name = "checkpoints/1000000/pretrained_model/model.safetensors"
    data = bytearray(files[name].data)
    data[-1] ^= 1
    files[name] = Blob(bytes(data), True)
    repo.commit("bad disk", files)
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors has checksum"):
        fetch_checkpoint(target, tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere" / "checkpoints").iterdir()) == []


def test_a_manifest_cannot_lead_out_of_the_folder(hub, target, run, tmp_path):
    repo = hub.create("user/model")
    _push_all(run[0], target)
    files = dict(repo.at("main").files)
    name = "checkpoints/1000000/manifest.json"
    manifest = json.loads(files[name].data)
    manifest["files"][0]["path"] = "../../../evil"
    files[name] = Blob(json.dumps(manifest).encode(), False)
    repo.commit("evil", files)
    step, skipped = newest_on_hub(target)
    assert step == 999_999
    assert "must stay in the checkpoint" in skipped[0]


def test_a_hub_out_of_reach_does_not_make_an_older_checkpoint_the_newest(hub, target, run):
    hub.create("user/model")
    _push_all(run[0], target)
    hub.faults.append(Fault(r"/resolve/.*/checkpoints/1000000/manifest\.json", status=403, times=9))
    with pytest.raises(PublishError, match="cannot be read"):
        newest_on_hub(target)


def test_a_repository_without_checkpoints_is_not_the_same_error_as_a_missing_one(
    hub, target, tmp_path
):
    hub.create("user/model")
    with pytest.raises(CheckpointNotFound, match="does not hold a complete checkpoint"):
        fetch_checkpoint(target, tmp_path)
    with pytest.raises(PublishError, match="HTTP 404"):
        fetch_checkpoint(replace(target, repo_id="user/other"), tmp_path)


def test_nothing_is_fetched_to_a_folder_that_cannot_be_written(
    hub, target, run, tmp_path, monkeypatch
):
    hub.create("user/model")
    _push_all(run[0], target)
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match=r"file/x cannot be written: Not a directory"):
        fetch_checkpoint(target, tmp_path / "file" / "x")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PublishError, match="has 1,000 bytes free, but the files to fetch need"):
        fetch_checkpoint(target, tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere" / "checkpoints").iterdir()) == []
    assert hub.requests_to("optimizer") == []


def test_a_push_does_not_block_the_training_and_survives_retention(hub, target, run):
    hub.create("user/model")
    hub.faults.append(Fault("/preupload/", delay_s=1.0))
    notes = []
    pusher = CheckpointPusher(target, on_note=notes.append)
    began = time.monotonic()
    for name in ("999999", "1000000"):
        pusher.push(run[0] / "checkpoints" / name)
    assert time.monotonic() - began < 0.5
    shutil.rmtree(run[0] / "checkpoints" / "999999")
    results = pusher.close()
    assert [push.step for push in results] == [999_999, 1_000_000]
    assert all(push.commit_url for push in results)
    assert newest_on_hub(target)[0] == 1_000_000
    assert "checkpoints/999999/manifest.json" in hub.files("user/model")
    assert sorted(p.name for p in (run[0] / "checkpoints").iterdir()) == ["1000000", "last"]


def test_after_a_stop_close_waits_only_briefly_for_a_push(hub, target, run):
    hub.create("user/model")
    answer = threading.Event()
    hub.faults.append(Fault("/preupload/", until=answer))
    pusher = CheckpointPusher(target, on_note=lambda line: None)
    pusher.push(run[0] / "checkpoints" / "1000000")
    began = time.monotonic()
    try:
        results = pusher.close(60, stop=lambda: time.monotonic() - began > 0.5, stop_wait_s=0.5)
        assert 0.9 < time.monotonic() - began < 5
    finally:
        answer.set()
        for thread in threading.enumerate():
            if thread.name.startswith("hub-"):
                thread.join(30)
    assert results[0].error == "was still being pushed after 1 s"
    assert results[0].retry


def test_failed_pushes_are_reported_and_do_not_stop_later_ones(hub, target, run):
    hub.create("user/model")
    hub.faults.append(Fault("/commit/", status=403))
    notes = []
    pusher = CheckpointPusher(target, on_note=notes.append)
    pusher.push(run[0] / "checkpoints" / "999999")
    pusher.push(run[0] / "nothing")
    pusher.push(run[0] / "checkpoints" / "1000000")
    results = pusher.close()
    assert sorted(push.step for push in results if push.commit_url) == [1_000_000]
    failed = [push for push in results if push.error]
    assert len(failed) == 2
    assert any(line.startswith(f"{run[0] / 'nothing'} not pushed: ") for line in notes)
    refused = next(push for push in failed if "HTTP 403" in push.error)
    path = run[0] / "checkpoints" / "999999"
    assert refused.retry == (
        f"ptrain publish {path} --resumable --repo_id user/model --revision main"
    )
    assert sum("not pushed" in line for line in notes) == 2


def test_a_slow_hub_does_not_let_pinned_checkpoints_pile_up(hub, target, run):
    hub.create("user/model")
    hub.faults.append(Fault("/preupload/", delay_s=1.0))
    pusher = CheckpointPusher(target, max_waiting=1, on_note=lambda line: None)
    folder = run[0] / "checkpoints"
    pusher.push(folder / "999999")
    while not hub.requests_to("/preupload/"):
        time.sleep(0.01)
    pusher.push(folder / "999999")
    pusher.push(folder / "1000000")
    assert len(list(folder.glob(".*tmp-*"))) == 2
    results = {push.step: push for push in pusher.close()}
    assert results[1_000_000].commit_url
    assert "newer ones are waiting" in next(p.error for p in pusher.close() if p.error)


def test_without_hard_links_a_checkpoint_is_pushed_without_a_copy(hub, target, run, monkeypatch):
    def no_links(*_, **__):
        raise OSError("not here")

    hub.create("user/model")
    monkeypatch.setattr("os.link", no_links)
    monkeypatch.setattr("shutil.copyfile", no_links)
    pusher = CheckpointPusher(target, on_note=lambda line: None)
    pusher.push(run[0] / "checkpoints" / "999999")
    assert [push.error for push in pusher.close()] == [""]
    assert newest_on_hub(target)[0] == 999_999


def test_a_pushed_checkpoint_contains_neither_paths_of_this_machine_nor_tokens(
    hub, target, tmp_path
):
    hub.create("user/model")
    config = {
        "output_dir": str(tmp_path / "run"),
        "dataset": {"root": "/home/somebody/drawers", "login": "hf_abcdefghijklmnop"},
        "steps": 1,
    }
    model, optimizer = _trained()
    with CheckpointSaver(
        tmp_path / "run",
        topology=Topology(),
        checkpoint_format=CheckpointFormat.SAFETENSORS_DCP,
        provenance={"environment": {"ACCELERATE_CONFIG": "/home/somebody/config.yaml"}},
    ) as saver:
        path = saver.save(
            step=1, samples_seen=2, model=model, optimizer=optimizer,
            train_config=json.dumps(config),
        )  # fmt: skip
    push_checkpoint_to_hub(path, target)
    for name, data in hub.files("user/model").items():
        for secret in (str(tmp_path), "/home/somebody", "hf_abcdefghijklmnop"):
            assert secret.encode() not in data, name
    fetched = fetch_checkpoint(target, tmp_path / "elsewhere")  # and the manifest still fits
    assert json.loads((fetched / "pretrained_model/train_config.json").read_text()) == {
        "output_dir": "run",
        "dataset": {"root": "drawers", "login": "removed"},
        "steps": 1,
    }


def test_a_push_that_takes_too_long_is_reported_once_by_close(hub, target, run):
    hub.create("user/model")
    hub.faults.append(Fault("/preupload/", delay_s=1.5))
    notes = []
    pusher = CheckpointPusher(target, on_note=notes.append)
    pusher.push(run[0] / "checkpoints" / "999999")
    results = pusher.close(timeout_s=0.2)
    assert [push.error for push in results] == ["was still being pushed after 0 s"]
    while hub.commits("user/model") == []:
        time.sleep(0.05)
    for thread in threading.enumerate():
        if thread.name == "hub-push":
            thread.join(30)
    assert pusher.close() == results  # told once, though it was pushed after all
    assert len(notes) == 1


def _fetch(folder):
    return fetch_on_main(Target(repo_id="user/model"), folder).name


def _slowly(seconds, error):
    from datetime import timedelta

    from parallel_ckpt import ranks as _ranks

    ranks = _ranks.all_ranks()
    _ranks._set_timeout(ranks.group, timedelta(seconds=2))

    def act():
        assert ranks.is_main
        time.sleep(seconds)
        if error:
            raise PublishError.of("user/model", "is away.")
        return "done"

    return on_main_at_leisure(act)


def test_ranks_wait_for_a_fetch_longer_than_for_one_another():
    assert run_ranks(_slowly, 2, 4, False) == ["done", "done"]
    for outcome in rank_outcomes(_slowly, 2, 4, True):
        assert outcome.error_type == "PublishError"
        assert "user/model is away." in outcome.error


def test_fetch_on_main_gives_every_rank_the_checkpoint(hub, target, run, tmp_path):
    hub.create("user/model")
    _push_all(run[0], target)
    results = run_ranks(_fetch, 2, tmp_path / "elsewhere", env=hub.environment)
    assert results == ["1000000", "1000000"]
