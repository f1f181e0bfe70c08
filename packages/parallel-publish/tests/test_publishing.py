"""Ranks, checkpoints and kept bundles are published whole in one commit; no failure loses them."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_ckpt import CheckpointNotFound, CheckpointSaver, DamagedCheckpoint
from parallel_config import CheckpointFormat, ConfigError, Topology
from parallel_publish import (
    CardInfo,
    PublishConfig,
    PublishError,
    preflight_publish,
    publish_checkpoint,
    publish_trained_model,
    save_pretrained,
)
from parallel_publish.bundle import write_card
from parallel_testing.hub import Fault
from parallel_testing.models import TinyModel
from parallel_testing.ranks import run_ranks

CONFIG = PublishConfig(enable=True, repo_id="user/model", license="mit", tags=("tiny",))
WEIGHTS = (".safetensors", ".distcp")
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Scaler:
    def save_pretrained(self, folder):
        (folder / "scaler.json").write_text("{}")


class WithPushOfItsOwn(TinyModel):
    """Its surface takes arguments that publishing knows nothing of; it must not be called."""

    def push_model_to_hub(self, cfg, peft_model, **rest):
        raise TypeError("not to be called")

    def save_pretrained(self, folder, state_dict):
        raise TypeError("not to be called")


def _publish_sharded(staging, repo_id="user/model"):
    model = WithPushOfItsOwn()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight.to_local().shape[0] < 3
    preflight_publish(CONFIG, staging=staging, needed_bytes=1000)
    began = time.monotonic()
    done = publish_trained_model(
        model,
        CONFIG,
        staging=staging,
        card=CardInfo(title="Tiny", losses=[(1, 2.0), (2, 1.0)], facts={"steps": 2}),
        files={"config.json": "{}"},
        processors=[Scaler()],
        train_config='{"steps": 2}',
    )
    seconds = time.monotonic() - began
    if done is None:
        return None, seconds
    return (done.ok, done.commit_url, str(done.error), done.retry), seconds


def test_ranks_publish_in_one_commit(hub, tmp_path):
    results = run_ranks(_publish_sharded, 2, tmp_path / "out", env=hub.environment)
    assert results[0][0][0], results
    assert results[1][0] is None
    assert hub.commits("user/model") == ["Publish the trained model"]
    files = hub.files("user/model")
    assert set(files) == {
        "README.md",
        "config.json",
        "loss_curve.svg",
        "model.safetensors",
        "scaler.json",
        "train_config.json",
    }
    (tmp_path / "again.safetensors").write_bytes(files["model.safetensors"])
    again = TinyModel(seed=None)
    again.load_state_dict(load_file(tmp_path / "again.safetensors"))
    assert torch.equal(again(X), TinyModel()(X))


def test_a_failed_upload_holds_no_rank_and_is_sent_again_from_its_folder(hub, tmp_path):
    hub.faults.append(Fault("/commit/", status=403))
    results = run_ranks(_publish_sharded, 2, tmp_path / "out", env=hub.environment)
    ok, url, error, retry = results[0][0]
    assert not ok
    assert url is None
    assert "HTTP 403 (the token may not do this)" in error
    assert retry == f"ptrain publish {tmp_path / 'out'} --repo_id user/model"
    assert hub.commits("user/model") == []
    again = publish_checkpoint(tmp_path / "out", CONFIG)
    assert again.ok
    assert "model.safetensors" in hub.files("user/model")


def test_other_ranks_do_not_wait_for_the_network(hub, tmp_path):
    hub.faults.append(Fault("/commit/", delay_s=4.0))
    results = run_ranks(_publish_sharded, 2, tmp_path / "out", env=hub.environment)
    assert results[0][1] > 4
    assert results[1][1] < 3
    assert hub.commits("user/model") == ["Publish the trained model"]


def _preflight_fails():
    with pytest.raises(PublishError, match="HTTP 401"):
        preflight_publish(CONFIG)
    preflight_publish(PublishConfig())


def test_preflight_is_the_same_error_on_every_rank(hub):
    run_ranks(_preflight_fails, 2, env=hub.environment | {"HF_TOKEN": "hf_nobody"})


def test_with_publishing_off_no_request_is_sent(hub):
    preflight_publish(PublishConfig(repo_id="user/model"))
    assert hub.requests == []


def test_preflight_refuses_a_disk_that_is_too_full(hub, tmp_path):
    with pytest.raises(PublishError, match="bytes free, but the files to publish need"):
        preflight_publish(CONFIG, staging=tmp_path, needed_bytes=10**18)


@pytest.fixture(params=list(CheckpointFormat))
def checkpoint(request, tmp_path):
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    saver = CheckpointSaver(tmp_path / "run", topology=Topology(), checkpoint_format=request.param)
    with saver:
        path = saver.save(
            step=7,
            samples_seen=14,
            model=model,
            optimizer=optimizer,
            train_config='{"steps": 7}',
            model_files={"config.json": "{}"},
        )
    return path, model


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_checkpoint_of_any_format_is_published(hub, checkpoint, tmp_path, dtype):
    path, model = checkpoint
    before = sorted(str(p) for p in path.parent.parent.rglob("*"))
    done = publish_checkpoint(path, CONFIG, dtype=dtype)
    assert done.ok, done.render()
    files = hub.files("user/model")
    assert set(files) == {"README.md", "config.json", "train_config.json", "model.safetensors"}
    assert not [name for name in files if "distcp" in name or "metadata" in name]
    assert b"| optimizer updates | 7 |" in files["README.md"]
    (tmp_path / "w.safetensors").write_bytes(files["model.safetensors"])
    weights = load_file(tmp_path / "w.safetensors")
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert all(torch.equal(weights[k], v.to(wanted)) for k, v in model.state_dict().items())
    assert sorted(str(p) for p in path.parent.parent.rglob("*")) == before


def test_a_dry_run_sends_no_request(hub, checkpoint):
    path, _ = checkpoint
    done = publish_checkpoint(path, CONFIG, dry_run=True)
    assert "would publish 4 files" in done.render()
    assert hub.requests == []
    assert [p.name for p in path.parent.parent.glob("publish-*")] == []


def test_a_private_model_is_not_sent_to_a_public_repository(hub, checkpoint):
    path, _ = checkpoint
    hub.create("user/model")
    done = publish_checkpoint(path, PublishConfig(repo_id="user/model", private=True))
    assert "exists and is public" in done.render()
    assert "--repo_id user/model --private" in done.retry
    assert hub.commits("user/model") == []


def _bundles(path):
    return sorted(p.name for p in path.parent.parent.iterdir() if "publish" in p.name)


def test_no_bundle_is_built_if_the_preflight_fails(hub, checkpoint, monkeypatch):
    """And the command that tries again says all that was asked for."""
    path, _ = checkpoint
    monkeypatch.setenv("HF_TOKEN", "")
    config = PublishConfig(
        repo_id="user/model", revision="v2", license="mit", tags=("a b", "c"), base_model="x/y"
    )
    done = publish_checkpoint(path.parent / "last", config, dtype="bf16", max_shard_size="1MB")
    assert "token is missing" in done.render()
    assert (done.bundle, done.files, _bundles(path)) == (None, {}, [])
    assert "kept" not in done.render()
    assert done.retry == (
        f"ptrain publish {path} --repo_id user/model --license mit --base_model x/y "
        "--tags 'a b' c --dtype bf16 --max_shard_size 1MB --revision v2"
    )


def test_a_new_attempt_replaces_the_former_bundle(hub, checkpoint):
    path, _ = checkpoint
    hub.faults.append(Fault("/commit/", status=403, times=3))
    first = publish_checkpoint(path, CONFIG)
    assert first.bundle.name == "publish-000007-user--model"
    (first.bundle / "left from before.txt").write_text("x")
    second = publish_checkpoint(path, CONFIG)
    assert second.bundle == first.bundle
    assert not (first.bundle / "left from before.txt").exists()
    other = publish_checkpoint(path, PublishConfig(repo_id="user/model", revision="a/b"))
    assert _bundles(path) == ["publish-000007-user--model", "publish-000007-user--model@a%2Fb"]
    assert other.retry.endswith("--repo_id user/model --revision a/b")
    assert publish_checkpoint(path, CONFIG, dry_run=True).ok  # takes no bundle away
    assert len(_bundles(path)) == 2
    assert publish_checkpoint(path, CONFIG).ok
    assert _bundles(path) == [other.bundle.name]


def test_a_former_bundle_stays_if_the_next_attempt_fails_at_the_preflight(hub, checkpoint):
    path, _ = checkpoint
    hub.faults.append(Fault("/commit/", status=403))
    first = publish_checkpoint(path, CONFIG)
    hub.faults.append(Fault("/validate-yaml", status=400))
    assert "is refused by the Hub" in publish_checkpoint(path, CONFIG).render()
    assert (first.bundle / "model.safetensors").is_file()


def test_a_bundle_that_is_being_sent_is_left_alone(hub, checkpoint):
    path, _ = checkpoint
    answer, running = threading.Event(), threading.Event()
    hub.faults.append(Fault("/commit/", until=answer))
    done = []
    thread = threading.Thread(target=lambda: done.append(publish_checkpoint(path, CONFIG)))
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not hub.requests_to("/commit/"):
            assert time.monotonic() < deadline
            running.wait(0.01)
        with pytest.raises(PublishError, match="is being sent by another process"):
            publish_checkpoint(path, CONFIG)
    finally:
        answer.set()
        thread.join(30)
    assert done[0].ok
    assert len(hub.commits("user/model")) == 1


def test_a_stop_leaves_a_bundle_or_the_command_that_makes_one(hub, checkpoint):
    path, _ = checkpoint
    done = publish_checkpoint(path, CONFIG, stop=lambda: bool(_bundles(path)))
    assert "stopped on request" in done.render()
    assert hub.commits("user/model") == []
    if (path / "pretrained_model" / "model.safetensors").exists():
        assert done.retry == f"ptrain publish {done.bundle} --repo_id user/model"
        assert publish_checkpoint(done.bundle, CONFIG).ok
    else:  # it was being converted
        assert done.bundle is None
        assert done.retry.startswith(f"ptrain publish {path} --repo_id user/model --license mit")
        assert _bundles(path) == []


def test_a_staging_folder_that_cannot_be_written_is_a_publish_error(hub, checkpoint, tmp_path):
    path, _ = checkpoint
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match="cannot be written: Not a directory"):
        publish_checkpoint(path, CONFIG, staging=tmp_path / "file" / "staging")


def test_a_dry_run_leaves_a_folder_as_it_was(hub, tmp_path):
    save_pretrained(TinyModel(), tmp_path / "out")
    before = sorted((tmp_path / "out").iterdir())
    done = publish_checkpoint(tmp_path / "out", CONFIG, dry_run=True)
    assert set(done.files) == {"README.md", "model.safetensors"}
    assert sorted((tmp_path / "out").iterdir()) == before
    hub.faults.append(Fault("/validate-yaml", status=400))
    done = publish_checkpoint(tmp_path / "out", CONFIG)
    assert done.retry.endswith("--repo_id user/model --license mit --tags tiny")
    assert sorted((tmp_path / "out").iterdir()) == before


def test_a_card_that_is_there_is_sent_as_it_is_and_says_so(hub, tmp_path):
    save_pretrained(
        TinyModel(), tmp_path / "out", files={"README.md": "---\nlicense: mit\n---\n# x"}
    )
    notes = []
    config = PublishConfig(repo_id="user/model", license="mit", tags=("arm",))
    assert publish_checkpoint(tmp_path / "out", config, on_note=notes.append).ok
    assert hub.files("user/model")["README.md"].endswith(b"# x")
    assert notes == [
        f"{tmp_path}/out/README.md is sent as it is, without arm; move it away, and "
        "a new one is written"
    ]


def test_a_file_size_is_honoured_without_a_change_of_dtype(hub, checkpoint, tmp_path):
    path, model = checkpoint
    assert publish_checkpoint(path, CONFIG, max_shard_size="300B").ok
    files = hub.files("user/model")
    weights = {name: data for name, data in files.items() if name.endswith(".safetensors")}
    assert len(weights) > 1
    assert "model.safetensors.index.json" in files
    found = {}
    for name, data in weights.items():
        (tmp_path / name).write_bytes(data)
        found |= load_file(tmp_path / name)
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="max_shard_size = '10XB' is not a size"):
        publish_checkpoint(path, CONFIG, max_shard_size="10XB")


def test_a_folder_is_sent_as_it_is(hub, tmp_path):
    """Less what is of no model; and what asks for a change is refused, not ignored."""
    save_pretrained(TinyModel(), tmp_path / "out")
    for name in (".env", ".git/config", "__pycache__/x.pyc", "data/private.csv", "notes.txt"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_text("x")
    for change in ({"dtype": "bf16"}, {"max_shard_size": "1KB"}):
        with pytest.raises(ConfigError, match="weights of a folder are sent as they are"):
            publish_checkpoint(tmp_path / "out", CONFIG, **change)
    assert hub.requests == []
    (tmp_path / "out" / "host").symlink_to("/etc/hostname")
    (tmp_path / "out" / "LICENSE").write_text("MIT")
    said = []
    assert publish_checkpoint(tmp_path / "out", CONFIG, on_note=said.append).ok
    assert set(hub.files("user/model")) == {"README.md", "model.safetensors", "LICENSE"}
    assert said[0] == "these are not files of a model and are not sent: data/, host, notes.txt"
    (tmp_path / "out" / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match=r"config.json is a link that leads out of the folder\."):
        publish_checkpoint(tmp_path / "out", CONFIG)


def test_only_what_the_manifest_lists_is_sent_of_a_checkpoint(hub, checkpoint):
    path, _ = checkpoint
    (path / "pretrained_model" / "notes.txt").write_text("mine")
    (path / "pretrained_model" / "preprocessor.json").write_text("{}")
    assert publish_checkpoint(path, CONFIG).ok
    assert set(hub.files("user/model")) == {
        "README.md",
        "config.json",
        "train_config.json",
        "model.safetensors",
    }


def test_a_kept_bundle_is_sent_with_all_that_was_put_into_it(hub, tmp_path):
    files = {"config.json": "{}", "stoi.txt": "a b"}
    run = tmp_path / "run"
    with CheckpointSaver(run, topology=Topology()) as saver:
        saver.save(step=1, samples_seen=1, model=TinyModel(), model_files=files)
    hub.faults.append(Fault("/commit/", status=403))
    first = publish_checkpoint(run, CONFIG)
    (first.bundle / "notes.txt").write_text("mine")
    said = []
    assert publish_checkpoint(first.bundle, CONFIG, on_note=said.append).ok
    # What was kept for this try is gone after it; what a person put there is not.
    assert [path.name for path in first.bundle.iterdir()] == ["notes.txt"]
    assert said[-1] == f"{first.bundle} is kept, because it holds other files: notes.txt"
    sent = set(hub.files("user/model"))
    assert sent == {"README.md", "config.json", "model.safetensors", "stoi.txt"}


def test_a_card_that_was_edited_on_the_hub_keeps_what_a_person_wrote(hub, checkpoint):
    from huggingface_hub import HfApi

    path, _ = checkpoint
    assert publish_checkpoint(path, CONFIG).ok
    card = hub.files("user/model")["README.md"].decode()
    edited = card.replace('license: "mit"', "license: apache-2.0") + "\nHow I use it.\n"
    HfApi(endpoint=hub.endpoint, token=hub.token).upload_file(
        path_or_fileobj=edited.encode(), path_in_repo="README.md", repo_id="user/model"
    )
    said = []
    again = PublishConfig(enable=True, repo_id="user/model", license="mit", base_model="user/base")
    assert publish_checkpoint(path, again, on_note=said.append).ok
    found = hub.files("user/model")["README.md"].decode()
    assert found.endswith("\nHow I use it.\n")
    assert "license: apache-2.0" in found
    assert 'base_model: "user/base"' in found
    assert said == ["the card of user/model keeps its own license, other than what was to be sent"]


HUB_FILES = {
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "spiece.model",
    "stats.json",
    "tokenizer.model.v3",
    "vocab.bpe",
    "vocab.spm",
}


def test_a_model_is_sent_with_its_common_files_and_nothing_else(hub, tmp_path):
    save_file({"mean": torch.zeros(1)}, tmp_path / "normalizer.safetensors")
    save_file(dict(TinyModel().state_dict()), tmp_path / "model.safetensors")
    kept = [".hidden.json", "key.pem", "more.json/a.json", "notes.txt", "wandb/b.model"]
    for name in (*HUB_FILES, *kept):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    said = []
    assert publish_checkpoint(tmp_path, CONFIG, on_note=said.append).ok
    weights = {"model.safetensors", "normalizer.safetensors"}
    assert set(hub.files("user/model")) == {"README.md"} | weights | HUB_FILES
    assert (
        said[0]
        == "these are not files of a model and are not sent: key.pem, more.json/, notes.txt, wandb/"
    )


@pytest.mark.parametrize("name", ["config.json", "train_config.json"])
def test_a_document_that_is_not_json_is_refused(hub, tmp_path, name):
    """Nor could the paths in it be taken out."""
    save_pretrained(TinyModel(), tmp_path / "out", files={name: '{"root": "/home/me'})
    with pytest.raises(ConfigError, match=rf"{name} is not a JSON document"):
        publish_checkpoint(tmp_path / "out", CONFIG)
    assert hub.requests == []


def test_an_index_that_is_not_a_weight_map_is_refused(hub, tmp_path):
    save_pretrained(TinyModel(), tmp_path / "out")
    (tmp_path / "out/model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not an index of weights"):
        publish_checkpoint(tmp_path / "out", CONFIG)


def test_a_damaged_checkpoint_is_not_published(hub, checkpoint):
    path, _ = checkpoint
    for file in (path / "pretrained_model").rglob("*"):
        if file.suffix in WEIGHTS:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        publish_checkpoint(path, CONFIG)
    assert hub.commits("user/model") == []
    assert _bundles(path) == []


def test_a_missing_file_is_reported_before_any_request(hub, checkpoint):
    path, _ = checkpoint
    next(f for f in (path / "pretrained_model").rglob("*") if f.suffix in WEIGHTS).unlink()
    with pytest.raises(DamagedCheckpoint):
        publish_checkpoint(path, CONFIG)
    assert hub.requests == []


def test_a_folder_of_save_pretrained_gets_a_card_and_hides_its_paths(hub, tmp_path):
    document = '{"dataset": {"root": "/home/somebody/drawers"}}'
    save_pretrained(TinyModel(), tmp_path / "a b", files={"train_config.json": document})
    hub.faults.append(Fault("/commit/", status=403))
    done = publish_checkpoint(tmp_path / "a b", CONFIG, card=CardInfo(train_config=document))
    assert done.retry == f"ptrain publish '{tmp_path / 'a b'}' --repo_id user/model"
    assert publish_checkpoint(tmp_path / "a b", CONFIG).ok
    files = hub.files("user/model")
    assert b'"root": "drawers"' in files["train_config.json"]
    assert b"license" in files["README.md"]
    assert not [name for name, data in files.items() if b"somebody" in data]


def test_a_folder_without_a_model_or_with_damaged_weights_is_refused(hub, tmp_path):
    with pytest.raises(CheckpointNotFound):
        publish_checkpoint(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ConfigError, match="is damaged"):
        publish_checkpoint(tmp_path, CONFIG)


SCRIPT = """
import sys, torch
from torch import nn
from parallel_publish import PreTrainedModel, PublishConfig, publish_trained_model

class Mine(PreTrainedModel):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(2, width)
    def forward(self, x):
        return self.linear(x)

if sys.argv[1] == "send":
    torch.manual_seed(5)
    model = Mine(width=4)
    config = PublishConfig(repo_id="user/mine")
    from parallel_publish import Target
    from parallel_publish.preflight import preflight
    preflight(Target.of(config))
    model.save_pretrained(sys.argv[2])
    from parallel_publish import publish_checkpoint
    assert publish_checkpoint(sys.argv[2], config).ok
else:
    model = Mine.from_pretrained("user/mine", meta=True)
print(model(torch.ones(1, 2)).tolist())
assert "parallel_train" not in sys.modules and "parallel_engine" not in sys.modules
"""


def test_a_model_of_a_script_comes_back_in_another_process(hub, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **hub.environment, "OMP_NUM_THREADS": "1"}
    outputs = []
    for action in ("send", "load"):
        command = [sys.executable, str(script), action, str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("[[")


def test_the_code_of_the_card_runs(hub, tmp_path):
    model = TinyModel()
    save_pretrained(model, tmp_path / "out")
    write_card(tmp_path / "out", CardInfo(), repo_id="user/model")
    assert publish_checkpoint(tmp_path / "out", CONFIG).ok
    card = hub.files("user/model")["README.md"].decode()
    code = card.split("```python\n")[1].split("```")[0]
    code += "print(sum(w.double().sum().item() for w in weights.values()), len(weights))\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **hub.environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    total, count = done.stdout.split()
    state = model.state_dict()
    assert int(count) == len(state)
    assert float(total) == pytest.approx(sum(w.double().sum().item() for w in state.values()))
