"""`ptrain publish` and `ptrain convert --push_to_hub` against a local Hub, over HTTP."""

import json
import re
import shlex
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file

from parallel_testing.hub import Fault, card_errors
from parallel_testing.hub_fixture import CLIENT_WARNING, local_hub  # noqa: F401
from parallel_testing.programs import run_program, run_ptrain
from parallel_train.cli.app import run
from parallel_train.cli.commands import ConvertCommand, PublishCommand
from parallel_train.cli.flags import flag_table
from parallel_train.policies.act.modeling import ACTPolicy
from parallel_train.policies.loading import load_policy
from parallel_train.policies.pretrained import PretrainedPolicy
from parallel_train.policies.reward.modeling import RewardModel

pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)
TRAIN = [
    *["train", "--steps", "2", "--batch_size", "4", "--dataset.episodes", "0"],
    *["--log_freq", "1000", "--seed", "3", "--policy.dim_model", "32"],
]
SMALL_ACT = ["--policy.dim_feedforward", "64", "--policy.n_vae_layers", "1"]
SHARDED = [
    *["--parallelism.dp_shard", "2", "--nproc_per_node", "2"],
    *["--checkpoint_format", "dcp"],
]
MODEL_FILES = {
    "README.md",
    "config.json",
    "loss_curve.svg",
    "model.safetensors",
    "preprocessor.json",
    "preprocessor.safetensors",
    "train_config.json",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by name; the dataset is named by its absolute path, which must not be published."""
    from parallel_train.data.config import EMBEDDED_ROOT

    folder = tmp_path_factory.mktemp("my runs")
    (folder / "drawers").symlink_to(EMBEDDED_ROOT)
    for name, flags in {
        "act": [*SMALL_ACT, "--policy.type", "act"],
        "sharded": [*SMALL_ACT, *SHARDED],
        "reward": ["--policy.type", "reward"],
    }.items():
        places = ["--output_dir", str(folder / name), "--dataset.root", str(folder / "drawers")]
        run_ptrain(*TRAIN, *flags, *places, cwd=folder)
    return folder


@pytest.fixture(params=["act", "sharded", "reward"])
def trained(request, runs):
    """Each run, one after another."""
    return runs / request.param


def answer(policy):
    """What a policy says to a batch that is not all zeros."""
    torch.manual_seed(0)
    batch = {name: value + 0.5 for name, value in policy.example_batch().items()}
    batch["task_index"] = torch.zeros(1, dtype=torch.long)
    if hasattr(policy.model, "select_action"):
        return policy.select_action(batch)
    return policy.predict_success(batch)


def test_what_was_published_answers_like_the_model_that_was_trained(hub, trained, tmp_path, capsys):
    assert run(["publish", str(trained), "--repo_id", "user/model", "--license", "mit"]) == 0
    assert "published 7 files" in capsys.readouterr().out
    assert hub.commits("user/model") == ["Publish the trained model"]
    files = hub.files("user/model")
    assert set(files) == MODEL_FILES  # and no shard among them
    assert [name for name, data in files.items() if str(trained.parent).encode() in data] == []
    assert json.loads(files["train_config.json"])["dataset"]["root"] == "drawers"
    (tmp_path / "again.json").write_bytes(files["train_config.json"])
    capsys.readouterr()
    assert run(["train", "--config", str(tmp_path / "again.json"), "--print_config"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(files["train_config.json"])

    before = load_policy(trained)
    after = load_policy("user/model")
    assert torch.equal(answer(before), answer(after))
    (tmp_path / "plain.safetensors").write_bytes(files["model.safetensors"])
    plain = load_file(tmp_path / "plain.safetensors")
    state = before.model.state_dict()
    assert plain.keys() == state.keys()
    assert all(torch.equal(plain[name], value) for name, value in state.items())


def test_the_card_is_accepted_says_what_happened_and_its_code_runs(hub, trained, tmp_path):
    assert run(["publish", str(trained), "--repo_id", "user/model"]) == 0
    files = hub.files("user/model")
    card = files["README.md"].decode()
    assert list(card_errors(card)) == []
    assert "null" not in card.split("---")[1]
    assert "| optimizer updates | 2 |" in card
    assert "| dataset | drawers |" in card
    assert "![training loss](loss_curve.svg)" in card
    assert files["loss_curve.svg"].startswith(b"<svg")
    code = card.split("```python\n")[1].split("```")[0]
    name = "success" if trained.name == "reward" else "action"
    (tmp_path / "of_the_card.py").write_text(f"{code}\nprint({name}.shape[0])\n")
    done = run_program("of_the_card", [], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.strip().endswith("1")


def test_the_class_loads_it_and_another_class_says_so(hub, runs):
    assert run(["publish", str(runs / "sharded"), "--repo_id", "user/model"]) == 0
    expected = load_policy(runs / "sharded").model.state_dict()
    for cls, meta in ((ACTPolicy, False), (ACTPolicy, True), (PretrainedPolicy, True)):
        model = cls.from_pretrained("user/model", meta=meta)
        assert type(model) is ACTPolicy
        assert not model.training
        assert all(torch.equal(expected[n], v) for n, v in model.state_dict().items())
    assert ACTPolicy.from_pretrained("user/model", n_action_steps=2).config.executed == 2
    with pytest.raises(ValueError, match="the policy 'act', so RewardModel cannot be built"):
        RewardModel.from_pretrained("user/model")


def test_save_pretrained_of_a_policy_comes_back(tmp_path, runs):
    loaded = load_policy(runs / "act")
    loaded.model.save_pretrained(tmp_path / "out", processors=[loaded.preprocessor])
    assert torch.equal(answer(load_policy(tmp_path / "out")), answer(loaded))


def test_wam_is_published_and_loaded_like_the_others(hub, tmp_path):
    from parallel_publish import PublishConfig, Target, publish_trained_model
    from parallel_publish.preflight import preflight
    from parallel_train.data.config import DatasetConfig
    from parallel_train.data.metadata import read_metadata
    from parallel_train.policies.wam.configuration import WAMConfig
    from parallel_train.policies.wam.modeling import WAMPolicy

    spec = read_metadata(DatasetConfig().folder).spec
    torch.manual_seed(1)
    model = WAMPolicy(WAMConfig(preset="tiny"), spec).eval()
    config = PublishConfig(enable=True, repo_id="user/wam")
    preflight(Target.of(config))
    done = publish_trained_model(model, config, staging=tmp_path / "bundle")
    assert done.ok, done.render()
    again = WAMPolicy.from_pretrained("user/wam", meta=True)
    assert (again.config, again.spec) == (model.config, model.spec)
    expected = model.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in again.state_dict().items())
    batch = {name: torch.full((1, w), 0.5) for name, w in spec.observation_vectors().items()}
    batch["task_index"] = torch.zeros(1, dtype=torch.long)
    actions = []
    for policy in (model, again):
        torch.manual_seed(2)
        actions.append(policy.select_action(batch))
    assert torch.equal(*actions)


def test_a_dry_run_builds_everything_and_sends_no_request(hub, runs, capsys):
    before = sorted(runs.rglob("*"))
    assert run(["publish", str(runs / "act"), "--repo_id", "user/model", "--dry_run"]) == 0
    assert "would publish 7 files" in capsys.readouterr().out
    assert hub.requests == []
    assert sorted(runs.rglob("*")) == before


def test_dtype_shards_licence_tags_branch_and_privacy_are_as_asked_for(hub, runs):
    words = ["--dtype", "bf16", "--max_shard_size", "100KB", "--license", "apache-2.0"]
    words += ["--tags", "arm", "drawer", "--revision", "v2", "--private", "--base_model", "a/b"]
    assert run(["publish", str(runs / "sharded"), "--repo_id", "team/model", *words]) == 0
    assert hub.repos["team/model"].private
    assert hub.files("team/model") == {}
    files = hub.files("team/model", "v2")
    weights = [name for name in files if name.startswith("model-")]
    assert len(weights) > 1
    assert "model.safetensors.index.json" in files
    for line in (b'license: "apache-2.0"', b'- "drawer"', b'base_model: "a/b"'):
        assert line in files["README.md"]
    model = ACTPolicy.from_pretrained("team/model", revision="v2", dtype=torch.bfloat16)
    expected = load_policy(runs / "sharded").model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype))


@pytest.mark.parametrize("output", [True, False])
def test_convert_publishes_what_it_made(hub, runs, tmp_path, output, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(runs / "sharded", copy, symlinks=True)
    words = ["--output", str(tmp_path / "model")] if output else []
    assert run(["convert", str(copy), *words, "--push_to_hub", "user/model", "--private"]) == 0
    said = capsys.readouterr().out
    assert "read back and compared" in said
    assert "published" in said
    files = hub.files("user/model")
    assert hub.repos["user/model"].private
    assert set(files) == (MODEL_FILES - {"loss_curve.svg"} if output else MODEL_FILES)
    assert [name for name, data in files.items() if str(runs).encode() in data] == []
    assert torch.equal(answer(load_policy("user/model")), answer(load_policy(runs / "sharded")))


def test_a_wrong_name_is_refused_before_anything_is_converted(hub, runs, tmp_path, capsys):
    words = ["convert", str(runs / "sharded"), "--output", str(tmp_path / "model")]
    assert run([*words, "--push_to_hub", "no/such/name"]) == 2
    assert "push_to_hub = 'no/such/name' is not a name on the Hub" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


COMMIT = "/commit/"
FAILURES = {
    "401": ([Fault(COMMIT, status=401)], "HTTP 401 (token missing, wrong or expired)"),
    "403": ([Fault(COMMIT, status=403)], "HTTP 403 (the token may not do this)"),
    "404": ([Fault(COMMIT, status=404)], "HTTP 404 (not found, or hidden from this token)"),
    "409": ([Fault(COMMIT, status=409)], "HTTP 409 (conflict)"),
    "412": ([Fault(COMMIT, status=412, times=9)], "HTTP 412 (the branch moved meanwhile)"),
    "429": (
        [Fault(COMMIT, status=429, times=9, headers={"Retry-After": "60"})],
        "HTTP 429 (too many requests)",
    ),
    "500": ([Fault(COMMIT, status=500, times=9)], "HTTP 500 (the server failed)"),
    "dropped": ([Fault(COMMIT, drop=True, times=9)], "RemoteProtocolError"),
    "slow": ([Fault("/preupload/v9", delay_s=6.0)], "no answer within 3 s"),
    "card": ([Fault("/validate-yaml", status=400)], "is refused by the Hub"),
    "weights": ([Fault("/lfs/", "PUT", status=403, times=9)], "HTTP 403"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_one_message_and_the_command_that_it_names_works(hub, runs, kind, capsys):
    faults, message = FAILURES[kind]
    hub.faults += [Fault(**vars(fault)) for fault in faults]  # faults count down
    final = kind in {"401", "403", "404", "409", "card"}
    limit = "60" if final else "3" if kind == "slow" else "4"  # before a third attempt
    words = ["--repo_id", "user/model", "--timeout_s", limit, "--revision", "v9", "--private"]
    assert run(["publish", str(runs / "act"), *words]) == 3
    said = capsys.readouterr()
    last = [line for line in said.err.splitlines() if not line.startswith("hub: ")]
    assert last[0].startswith("not published: ")
    assert message in last[0]
    built = [] if kind == "card" else ["kept"]  # found out before anything is built
    assert [line.split(":")[0].strip() for line in last[1:]] == [*built, "retry"]
    assert "Traceback" not in said.err
    assert hub.token not in said.err
    if kind == "card":
        assert "user/model" not in hub.repos
    else:
        assert hub.commits("user/model") == []
    hub.faults.clear()
    command = shlex.split(last[-1].partition("retry:")[2])
    assert command[0] == "ptrain"
    assert run(command[1:]) == 0
    assert set(hub.files("user/model", "v9")) == MODEL_FILES
    assert torch.equal(
        answer(load_policy("user/model", revision="v9")), answer(load_policy(runs / "act"))
    )
    for thread in threading.enumerate():
        if thread.name == "hub-request":  # what was given up still waits for the slow answer
            thread.join(60)


def test_a_token_that_is_wrong_or_missing_or_read_only_is_refused(hub, runs, monkeypatch, capsys):
    for token, message in {
        "hf_nobody": "HTTP 401 (token missing, wrong or expired)",
        "hf_test_reader": "may only read",
        "hf_test_stranger": "belongs to neither 'stranger' nor an organization",
        "": "is missing: the Hub takes files only from a known user",
    }.items():
        monkeypatch.setenv("HF_TOKEN", token)
        assert run(["publish", str(runs / "act"), "--repo_id", "user/model"]) == 3
        said = capsys.readouterr().err
        assert message in said
        assert "retry: ptrain publish" in said
    assert hub.repos == {}


def test_offline_no_request_is_made_and_no_file_is_written(hub, runs, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = sorted(runs.rglob("*"))
    for words, code in {
        ("publish", str(runs / "act"), "--repo_id", "user/model"): 3,
        ("publish", str(runs / "act"), "--repo_id", "user/model", "--resumable"): 3,
        ("convert", str(runs / "sharded"), "--push_to_hub", "user/model"): 2,
        ("resume", "--from_hub", "user/model"): 2,
    }.items():
        assert run(list(words)) == code
        said = capsys.readouterr().err
        assert "HF_HUB_OFFLINE is set, so user/model cannot be reached. Unset it.\n" in said
        assert "--publish." not in said
    assert sorted(runs.rglob("*")) == before
    assert hub.requests == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["publish", "--repo_id", "bad//name"], "repo_id = 'bad//name' is not a name on the Hub"),
        (["publish", "--license", "gpl4"], "license = 'gpl4' is not a licence identifier"),
        (["publish", "--base_model", "/x"], "base_model = '/x' is not a name on the Hub"),
        (
            ["publish", "--timeout_s", "0"],
            "timeout_s = 0, but it must be at least 1. Use --timeout_s",
        ),
        (["publish", "--private"], "private = True, but user/model exists and is public."),
        (
            ["publish", "--resumable", "--dtype", "bf16", "--tags", "x"],
            "resumable = True sends the whole checkpoint as it is, without --tags, --dtype.",
        ),
        (["publish", "--max_shard_size", "10XB"], "max_shard_size = '10XB' is not a size"),
        (["convert", "--push_to_hub", "bad//name"], "push_to_hub = 'bad//name' is not a name on"),
        (["convert", "--private"], "private = True, but user/model exists and is public."),
        (["convert", "--push_to_hub", "me/x"], "push_to_hub = 'me/x' belongs to neither 'user'"),
    ],
)
def test_a_message_names_flags_of_the_command_that_was_run(hub, runs, words, message, capsys):
    hub.create("user/model")
    place = "--repo_id" if words[0] == "publish" else "--push_to_hub"
    given = [] if place in words else [place, "user/model"]
    before = sorted(runs.rglob("*"))
    assert run([words[0], str(runs / "sharded"), *given, *words[1:]]) in (2, 3)
    said = capsys.readouterr().err
    assert message in said
    assert "publish." not in said
    command = {
        "publish": PublishCommand(path="", repo_id=""),
        "convert": ConvertCommand(path=""),
    }[words[0]]
    named = re.findall(r"--(\w+(?:\.\w+)*)", said.partition("retry:")[0])
    assert set(named) <= flag_table(command).keys()
    assert sorted(runs.rglob("*")) == before
    assert hub.commits("user/model") == []


def test_a_failure_that_passes_is_tried_again(hub, runs, capsys):
    hub.faults += [Fault(COMMIT, status=500), Fault(COMMIT, drop=True, after=True)]
    assert run(["publish", str(runs / "act"), "--repo_id", "user/model"]) == 0
    said = capsys.readouterr()
    assert "HTTP 500 (the server failed); attempt 2 of 5" in said.err
    assert set(hub.files("user/model")) == MODEL_FILES


def test_a_whole_checkpoint_goes_to_its_branch(hub, runs, capsys):
    words = ["publish", str(runs / "act"), "--repo_id", "user/model", "--resumable"]
    assert run([*words, "--dry_run"]) == 0
    assert hub.requests == []
    assert run(words) == 0
    assert "pushed" in capsys.readouterr().out
    assert hub.files("user/model") == {}
    names = set(hub.files("user/model", "checkpoints"))
    assert "checkpoints/000002/manifest.json" in names
    assert "checkpoints/000002/training_state/optimizer/.metadata" in names


def test_a_checkpoint_that_could_not_be_pushed_names_the_command(hub, runs, capsys):
    hub.faults.append(Fault(COMMIT, status=403))
    assert run(["publish", str(runs / "act"), "--repo_id", "user/model", "--resumable"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("not pushed: user/model@checkpoints cannot be written at")
    assert hub.commits("user/model") == []
    assert run(shlex.split(said.partition("retry: ptrain ")[2])) == 0
    assert hub.commits("user/model") == ["Checkpoint of step 2"]


def test_the_model_and_its_checkpoints_share_a_repository(hub, runs):
    """DCP shards of a resumable checkpoint stay off the branch that a reader downloads."""
    assert run(["publish", str(runs / "sharded"), "--repo_id", "user/model"]) == 0
    assert run(["publish", str(runs / "sharded"), "--repo_id", "user/model", "--resumable"]) == 0
    assert set(hub.files("user/model")) == MODEL_FILES
    assert any(name.endswith(".distcp") for name in hub.files("user/model", "checkpoints"))
    assert torch.equal(answer(load_policy("user/model")), answer(load_policy(runs / "sharded")))


def test_a_policy_that_is_not_installed_is_published_all_the_same(hub, runs, tmp_path):
    """Its class cannot be imported here, so the card says less; the weights are what matters."""
    shutil.copytree(runs / "act" / "checkpoints/000002/pretrained_model", tmp_path / "model")
    for name in ("config.json", "train_config.json"):
        text = (tmp_path / "model" / name).read_text()
        (tmp_path / "model" / name).write_text(text.replace('"act"', '"elsewhere.models:Mine"'))
    assert run(["publish", str(tmp_path / "model"), "--repo_id", "user/model"]) == 0
    assert b"load_file" in hub.files("user/model")["README.md"]
    with pytest.raises(ValueError, match=r"elsewhere\.models:Mine"):
        load_policy("user/model")


def test_publishing_nothing_and_to_no_place_is_refused(hub, runs, capsys):
    assert run(["publish", str(runs / "nothing"), "--repo_id", "user/model"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert run(["publish", str(runs / "act"), "--repo_id", "bad//name"]) == 2
    assert hub.requests == []
