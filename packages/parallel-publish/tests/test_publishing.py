"""Ranks, checkpoints and kept bundles are published whole in one commit; no failure loses them."""

import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_ckpt import CheckpointNotFound, CheckpointSaver, DamagedCheckpoint
from parallel_config import CheckpointFormat, Topology
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


def test_with_publishing_off_nobody_is_asked(hub):
    preflight_publish(PublishConfig(repo_id="user/model"))
    assert hub.requests == []


def test_preflight_looks_at_the_disk(hub, tmp_path):
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


def test_a_dry_run_asks_nobody(hub, checkpoint):
    path, _ = checkpoint
    done = publish_checkpoint(path, CONFIG, dry_run=True)
    assert "would publish 4 files" in done.render()
    assert hub.requests == []
    assert [p.name for p in path.parent.parent.glob("publish-*")] == []


def test_no_room_for_a_private_model_in_a_public_repository(hub, checkpoint):
    path, _ = checkpoint
    hub.create("user/model")
    done = publish_checkpoint(path, PublishConfig(repo_id="user/model", private=True))
    assert "exists and is public" in done.render()
    assert "--repo_id user/model --private" in done.retry
    assert (done.bundle / "model.safetensors").is_file()
    assert hub.commits("user/model") == []


def test_damage_is_not_published(hub, checkpoint):
    path, _ = checkpoint
    for file in (path / "pretrained_model").rglob("*"):
        if file.suffix in (".safetensors", ".distcp"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
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


def test_wrong_folders(hub, tmp_path):
    with pytest.raises(CheckpointNotFound):
        publish_checkpoint(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(PublishError, match="is damaged"):
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
    from parallel_publish.hub import Target, preflight
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
