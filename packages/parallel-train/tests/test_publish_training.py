"""A run that publishes: checked first, never held up, never lost, resumed from what it pushed."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from parallel_config import CheckpointConfig, ReportedError, Topology
from parallel_publish import PublishConfig
from parallel_testing.hub import Blob, Fault
from parallel_testing.hub_fixture import CLIENT_WARNING, local_hub  # noqa: F401
from parallel_testing.programs import run_ptrain
from parallel_train.cli.app import run
from parallel_train.cli.from_hub import fetched
from parallel_train.cli.parsing import parse
from parallel_train.config import TrainConfig
from parallel_train.data.config import EMBEDDED_ROOT
from parallel_train.data.metadata import read_metadata
from parallel_train.hub.run_publisher import RunPublisher
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.loading import load_policy
from parallel_train.run.folder import RunFiles

pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)
TRAIN = [
    *["train", "--batch_size", "4", "--dataset.episodes", "0", "--log_freq", "1000"],
    *["--policy.dim_model", "32", "--policy.dim_feedforward", "64", "--policy.no-use_vae"],
    *["--policy.dropout", "0", "--scheduler.decay_steps", "6", "--checkpoint.save_freq", "2"],
]
TWO = ["--nproc_per_node", "2"]
SHARDED = [*TWO, "--parallelism.dp_shard", "2", "--checkpoint_format", "dcp"]
PUBLISH = ["--publish.enable", "--publish.repo_id", "user/run"]
PUSH = ["--publish.push_checkpoints", "--publish.repo_id", "user/run"]


class Ptrain:
    """`ptrain` in processes of its own."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, *words, script=("-m", "parallel_train")):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environ = {k: v for k, v in os.environ.items() if k not in names}
        return subprocess.Popen(
            [sys.executable, *script, *map(str, words)],
            cwd=self.folder,
            env={**environ, "OMP_NUM_THREADS": "1", "PARALLEL_DEVICE": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *words, code=0, timeout_s=240, script=None):
        if script is None:
            return run_ptrain(*words, cwd=self.folder, code=code, timeout_s=timeout_s)
        process = self.start(*words, script=script)
        try:
            said = process.communicate(timeout=timeout_s)[0]
        finally:
            process.kill()
        assert process.returncode == code, f"exit {process.returncode}\n{said}"
        return said

    def rows(self, name):
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def ptrain(tmp_path):
    return Ptrain(tmp_path)


def wait_for(condition, process, timeout_s=180):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def steps_of(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


GUARD = """
import sys

def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        if not isinstance(args[-1], str):  # a path: sockets of this machine's processes
            print("NETWORK", event, args, flush=True)

sys.addaudithook(refuse)
from parallel_train.cli.app import run
code = run(sys.argv[1:])
print("imported", [name for name in sys.modules if name.startswith("huggingface_hub.hf_api")])
sys.exit(code)
"""


def test_with_publishing_off_there_is_no_network_call(hub, ptrain):
    named = ["--publish.repo_id", "user/run", "--publish.license", "mit"]
    guard = ("-c", GUARD)
    said = ptrain(*TRAIN, *named, "--steps", 2, "--output_dir", "run", script=guard)
    assert "finished: step 2 of 2" in said
    assert "NETWORK" not in said
    said = ptrain("publish", "run", "--repo_id", "user/run", "--dry_run", script=guard)
    assert "would publish 7 files" in said
    assert "NETWORK" not in said
    assert hub.requests == []
    said = ptrain(*TRAIN, *PUBLISH, "--steps", 1, "--output_dir", "other", script=guard)
    assert "NETWORK" in said  # the guard can see one


def _preflight(hub, folder, *, policy=None, **publish):
    publish = {"enable": True, "repo_id": "user/run", **publish}
    config = TrainConfig(policy=policy or ACTConfig(), publish=PublishConfig(**publish))
    with pytest.raises(ReportedError) as caught:
        RunPublisher(
            config,
            RunFiles(folder),
            Topology(),
            is_main=True,
            metadata=lambda: read_metadata(config.dataset.folder),
        ).check()
    assert not folder.exists()
    assert hub.repos.keys() <= {"user/open"}
    return str(caught.value)


@pytest.mark.parametrize(
    ("token", "publish", "message"),
    [
        ("", {}, "token is missing"),
        ("hf_nobody", {}, "HTTP 401"),
        ("hf_test_reader", {}, "may only read"),
        ("hf_test_stranger", {}, "belongs to neither 'stranger'"),
        (None, {"repo_id": "user/open", "private": True}, "exists and is public"),
        (None, {"enable": False, "push_checkpoints": True, "repo_id": "other/run"}, "belongs to"),
    ],
)
def test_what_could_not_be_published_is_known_before_anything_is_built(
    hub, tmp_path, monkeypatch, token, publish, message
):
    hub.create("user/open")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert message in _preflight(hub, tmp_path / "run", **publish)
    assert hub.commits("user/open") == []


def test_room_for_the_bundle_is_looked_for_first(hub, tmp_path):
    """Of a model that no machine could build: its size is known without memory."""
    policy = ACTConfig(dim_model=2**16, dim_feedforward=2**24, n_heads=4)
    message = _preflight(hub, tmp_path / "run", policy=policy)
    assert "bytes free, but the files to publish need" in message
    assert hub.requests == []


def test_a_refused_card_and_a_hub_out_of_reach_end_the_run_before_it_begins(
    hub, tmp_path, monkeypatch
):
    from huggingface_hub import constants

    hub.create("user/open")
    hub.faults.append(Fault("/validate-yaml", status=400))
    message = _preflight(hub, tmp_path / "run", repo_id="user/open")
    assert "model card is refused by the Hub" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = _preflight(hub, tmp_path / "run")
    assert "HF_HUB_OFFLINE is set" in message
    assert message.endswith("Use --publish.no-enable to train all the same.")
    message = _preflight(hub, tmp_path / "run", enable=False, push_checkpoints=True)
    assert message.endswith("Use --publish.no-push_checkpoints to train all the same.")


def test_publishing_without_a_repository_is_refused_at_once(capsys):
    assert run(["train", "--publish.enable"]) == 2
    assert "publish.repo_id is missing. Use --publish.repo_id user/name" in capsys.readouterr().err


def test_every_rank_leaves_with_2_when_the_preflight_fails(hub, ptrain, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    said = ptrain(*TRAIN, *SHARDED, *PUBLISH, "--steps", 2, "--output_dir", "run", code=2)
    assert said.count("HTTP 401 (token missing, wrong or expired)") == 1
    assert "training" not in said
    assert not (ptrain.folder / "run").exists()


def test_a_sharded_run_publishes_and_goes_on_from_the_hub(hub, ptrain):
    """Pushed while it trains, with retention deleting behind it; to the last bit on 2 ranks."""
    flags = [*TRAIN, *SHARDED]
    ptrain(*flags, "--steps", 6, "--output_dir", "whole")
    said = ptrain(
        *flags, *PUBLISH, *PUSH, "--steps", 4, "--output_dir", "part", "--publish.private",
        "--checkpoint.keep_last", 1, "--checkpoint.async_save",
    )  # fmt: skip
    assert "published 7 files" in said
    assert "checkpoint 2 pushed to user/run" in said
    assert steps_of(ptrain.folder / "part") == ["000004", "last"]
    assert list((ptrain.folder / "part").glob("publish-*")) == []
    assert hub.repos["user/run"].private
    model = hub.files("user/run")
    assert len(model) == 7
    assert "model.safetensors" in model
    pushed = hub.files("user/run", "checkpoints")
    assert {name.split("/")[1] for name in pushed if "/" in name} == {"000002", "000004"}
    for files in (model, pushed):
        assert [name for name, data in files.items() if str(ptrain.folder).encode() in data] == []

    before = load_policy(ptrain.folder / "part").model.state_dict()
    after = load_policy("user/run").model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())

    said = ptrain(
        "resume", "--from_hub", "user/run", *TWO, "--steps", 6, "--output_dir", "two ranks"
    )
    assert "fetching checkpoint 4 of user/run into two ranks" in said
    assert "published 7 files" in said  # the run goes on where it came from
    exact = ("step", "loss", "grad_norm", "lr", "samples_seen")
    for found, wanted in zip(ptrain.rows("two ranks"), ptrain.rows("whole")[4:], strict=True):
        assert {name: found[name] for name in exact} == {name: wanted[name] for name in exact}

    said = ptrain(
        "resume", "--from_hub", "user/run@checkpoints", "--steps", 8, "--output_dir", "one rank",
        "--publish.no-enable", "--publish.no-push_checkpoints",
    )  # fmt: skip
    assert "fetching checkpoint 6 of" in said
    assert "keeps the global batch of 8 samples" in said
    assert ptrain.rows("one rank")[-1]["samples_seen"] == 8 * 8


def test_replicated_ranks_publish_the_average_that_their_checkpoint_holds(hub, ptrain):
    """On a branch, which the printed command names as well."""
    flags = ["--ema.decay", "0.5", "--no-ema.warmup", "--publish.revision", "v2"]
    said = ptrain(*TRAIN, *TWO, *PUBLISH, *flags, "--steps", 2, "--output_dir", "run")
    bundle = f"{ptrain.folder}/run/publish-000002-user--run@v2"
    command = f"ptrain publish {bundle} --repo_id user/run --revision v2"
    assert f"publishing; if this is interrupted, run: {command}\n" in said
    assert hub.files("user/run") == {}
    before = load_policy(ptrain.folder / "run").model.state_dict()
    after = load_policy("user/run", revision="v2").model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_run_whose_uploads_fail_ends_well_and_its_commands_mend_it(hub, ptrain):
    hub.faults.append(Fault("/commit/", status=403, times=99))
    said = ptrain(*TRAIN, *SHARDED, *PUBLISH, *PUSH, "--steps", 4, "--output_dir", "my run", code=3)
    assert "finished: step 4 of 4" in said
    assert said.count("not published: user/run@main cannot be written") == 1
    assert "HTTP 403 (the token may not do this)" in said
    assert "Traceback" not in said
    assert hub.commits("user/run") == []
    folder = ptrain.folder / "my run"
    assert steps_of(folder) == ["000002", "000004", "last"]
    assert run(["verify", str(folder)]) == 0
    assert (folder / "publish-000004-user--run/model.safetensors").is_file()
    said_again = ptrain("resume", folder)
    assert f"is finished: step 4 of 4; to publish it: ptrain publish '{folder}'" in said_again

    hub.faults.clear()
    commands = [x.partition("retry:")[2] for x in said.splitlines() if x.startswith("  retry:")]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "ptrain"
        assert run(words[1:]) == 0
    before = load_policy(folder).model.state_dict()
    after = load_policy("user/run").model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    names = hub.files("user/run", "checkpoints")
    assert {"checkpoints/000002/manifest.json", "checkpoints/000004/manifest.json"} <= set(names)


def _children(process):
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def test_a_hub_that_does_not_answer_holds_up_no_step_and_no_rank(hub, ptrain):
    answer_now = threading.Event()
    hub.faults.append(Fault("/preupload/checkpoints", until=answer_now))
    hub.faults += [Fault("/commit/", status=500), Fault("/commit/", drop=True, after=True)]
    process = ptrain.start(*TRAIN, *SHARDED, *PUSH, "--steps", 6, "--output_dir", "run")
    try:
        last = ptrain.folder / "run/checkpoints/000006/manifest.json"
        wait_for(last.exists, process)  # trained to the end
        wait_for(lambda: len(_children(process)) == 1, process)  # rank 1 has left with 0
        assert hub.commits("user/run") == []
        assert len(hub.requests_to("/preupload/checkpoints")) == 1
        answer_now.set()
        said = process.communicate(timeout=120)[0]
    finally:
        answer_now.set()
        process.kill()
    assert process.returncode == 0, said
    assert "HTTP 500 (the server failed); attempt 2 of 5" in said
    assert hub.commits("user/run") == [f"Checkpoint of step {step}" for step in (2, 4, 6)]


def test_a_stop_does_not_wait_long_for_a_push(hub, ptrain):
    answer_now = threading.Event()
    hub.faults.append(Fault("/preupload/checkpoints", until=answer_now))
    process = ptrain.start(*TRAIN, *PUSH, "--steps", 10**6, "--output_dir", "run")
    try:
        wait_for(lambda: hub.requests_to("/preupload/checkpoints"), process)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[0]
    finally:
        answer_now.set()
        process.kill()
    assert process.returncode == 75, said
    assert "was still being pushed after 10 s" in said
    assert run(["verify", str(ptrain.folder / "run")]) == 0


SENDING = r"^/lfs/[0-9a-f]+$"


def _stopped(process, hub, number, fault):
    """Ask it to leave once a request is under way; what it said, and the seconds until it left."""
    answer = threading.Event()
    method = "PUT" if fault == SENDING else ""
    hub.faults.append(Fault(fault, method, until=answer, times=99))
    try:
        wait_for(lambda: hub.requests_to(fault, method), process)
        began = time.monotonic()
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
        return said, time.monotonic() - began
    finally:
        answer.set()
        process.kill()


@pytest.mark.parametrize("ranks", [[], SHARDED], ids=["one", "launched"])
def test_a_stop_ends_the_upload_and_the_command_that_is_printed_goes_on(hub, ptrain, ranks):
    """Trained to the end, so 3: starting the run again would bring nothing."""
    flags = [*TRAIN, *ranks, *PUBLISH, "--steps", 2, "--output_dir", "run"]
    process = ptrain.start(*flags)
    said, seconds = _stopped(process, hub, signal.SIGTERM, SENDING)
    assert "finished: step 2 of 2" in said
    assert process.returncode == 3, said
    assert "not published: user/run@main is not written: stopped on request." in said
    assert seconds < 15
    assert hub.commits("user/run") == []
    hub.faults.clear()
    command = shlex.split(next(x for x in said.splitlines() if x.startswith("  retry:")))[1:]
    assert command[:2] == ["ptrain", "publish"]
    assert run(command[1:]) == 0
    before = load_policy(ptrain.folder / "run").model.state_dict()
    after = load_policy("user/run").model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("what", [[], ["--resumable"]], ids=["model", "checkpoint"])
def test_a_stop_ends_ptrain_publish_and_its_retry_publishes(hub, ptrain, number, what):
    ptrain(*TRAIN, "--steps", 2, "--output_dir", "run")
    process = ptrain.start("publish", "run", "--repo_id", "user/run", *what)
    said, seconds = _stopped(process, hub, number, SENDING)
    assert process.returncode == 3, said
    assert "is not written: stopped on request." in said
    assert "Traceback" not in said
    assert seconds < 10
    assert hub.commits("user/run") == []
    hub.faults.clear()
    command = shlex.split(next(x for x in said.splitlines() if x.startswith("  retry:")))[1:]
    assert run(command[1:]) == 0
    assert len(hub.commits("user/run")) == 1


def test_ctrl_c_during_a_fetch_leaves_nothing_half_done(hub, ptrain, pushed):
    process = ptrain.start("resume", "--from_hub", "user/run", "--output_dir", "mine")
    said, seconds = _stopped(process, hub, signal.SIGINT, "/resolve/.*safetensors$")
    assert process.returncode == 130, said
    assert said.endswith("ptrain: stopped\n")
    assert "Traceback" not in said
    assert seconds < 10
    # A file that arrives meanwhile keeps its hidden folder, which the next start clears.
    left = [p.name for p in (ptrain.folder / "mine/checkpoints").iterdir()]
    assert all(name.startswith(".000002.tmp-") for name in left)
    hub.faults.clear()
    ptrain("resume", "--from_hub", "user/run", "--output_dir", "mine", "--steps", 3)
    assert steps_of(ptrain.folder / "mine") == ["000002", "000003", "last"]


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """A run of two steps that says it publishes into a repository of somebody else."""
    ptrain = Ptrain(tmp_path_factory.mktemp("stranger"))
    (ptrain.folder / "drawers").symlink_to(EMBEDDED_ROOT)
    flags = ["--steps", 2, "--output_dir", "run", "--publish.repo_id", "team/other"]
    ptrain(*TRAIN, *flags, "--dataset.root", ptrain.folder / "drawers")
    folder, name = ptrain.folder / "run/checkpoints/000002", "pretrained_model/train_config.json"
    document = json.loads((folder / name).read_text())
    document["publish"] |= {"enable": True, "push_checkpoints": True}
    _replace(folder, name, document)
    return ptrain.folder


@pytest.fixture
def pushed(hub, ptrain, strangers, monkeypatch):
    """A copy of that run, pushed to user/run."""
    shutil.copytree(strangers / "run", ptrain.folder / "run", symlinks=True)
    (ptrain.folder / "drawers").symlink_to(EMBEDDED_ROOT)
    assert run(["publish", str(ptrain.folder / "run"), "--repo_id", "user/run", "--resumable"]) == 0
    monkeypatch.chdir(ptrain.folder)
    return hub.repos["user/run"]


def _replace(checkpoint, name, document):
    """Change a file of a checkpoint as its owner could: the manifest fits."""
    from parallel_ckpt.formats.hashing import hash_bytes
    from parallel_ckpt.store.manifest import signed_text

    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for record in manifest["files"]:
        if record["path"] == name:
            record |= {"size_bytes": len(data), "checksum": hash_bytes(data)}
    (checkpoint / "manifest.json").write_text(signed_text(manifest))


def _forget(checkpoint, name):
    """Take a file out of a checkpoint as its owner could: the manifest fits."""
    from parallel_ckpt.store.manifest import signed_text

    (checkpoint / name).unlink()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = [record for record in manifest["files"] if record["path"] != name]
    (checkpoint / "manifest.json").write_text(signed_text(manifest))


def test_resuming_a_strangers_run_publishes_nothing(hub, ptrain, pushed):
    said = ptrain("resume", "--from_hub", "user/run", "--steps", 3, "--output_dir", "mine")
    assert "finished: step 3 of 3" in said
    assert "team/other" not in hub.repos
    config = json.loads((ptrain.folder / "mine/train_config.json").read_text())
    assert not config["publish"]["enable"]
    # It lies here, and the run goes on with it from anywhere; elsewhere it is asked for.
    assert config["dataset"]["root"] == str(ptrain.folder / "drawers")
    (ptrain.folder / "drawers").unlink()
    words = ["resume", "--from_hub", "user/run", "--steps", 3, "--output_dir"]
    assert "dataset.root" in ptrain(*words, "other", code=2)
    ptrain(*words, "third", "--dataset.root", EMBEDDED_ROOT)


@pytest.mark.parametrize("asked", [[], ["--logging.wandb"]])
def test_a_strangers_run_logs_nowhere_unless_it_is_asked_for(hub, ptrain, pushed, capsys, asked):
    folder = ptrain.folder / "run/checkpoints/000002"
    config = json.loads((folder / "pretrained_model/train_config.json").read_text())
    config["logging"] = {"wandb": True, "wandb_entity": "stranger"}
    _replace(folder, "pretrained_model/train_config.json", config)
    assert run(["publish", str(folder), "--repo_id", "user/run", "--resumable"]) == 0
    argv = fetched(["resume", "--from_hub", "user/run", "--output_dir", "mine", *asked])
    assert parse(argv).command.run.logging.wandb == bool(asked)
    assert ("add --logging.wandb to do so" in capsys.readouterr().out) != bool(asked)


def test_ranks_of_torchrun_fetch_together(hub, ptrain, pushed):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = (*torchrun, "-m", "parallel_train")
    words = ["--output_dir", "mine", "--steps", 3, "--batch_size", 2]
    said = ptrain("resume", "--from-hub=user/run", *words, script=script)
    assert said.count("fetching checkpoint 2 of user/run into mine") == 1
    assert [row["samples_seen"] for row in ptrain.rows("mine")] == [12]
    said = ptrain("resume", "--from_hub", "user/nothing", *words, script=script, code=1)
    assert said.count("user/nothing@checkpoints cannot be read") == 1


def test_a_strangers_checkpoint_runs_no_code(hub, ptrain, pushed, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    import pickle

    folder = ptrain.folder / "run/checkpoints/000002"
    _replace(folder, "training_state/optimizer/.metadata", pickle.dumps(Evil()))
    _forget(folder, "training_state/optimizer/index.json")  # or the pickle is not looked at
    assert run(["publish", str(folder), "--repo_id", "user/run", "--resumable"]) == 0
    said = ptrain("resume", "--from_hub", "user/run", "--steps", 3, "--output_dir", "mine", code=2)
    assert "posix.system" in said
    assert not (tmp_path / "executed").exists()


def test_the_newest_complete_one_is_taken_by_number(hub, ptrain, pushed, capsys):
    files = dict(pushed.at("checkpoints").files)
    for name, blob in list(files.items()):
        if name.startswith("checkpoints/000002/") and "train_config" not in name:
            files[name.replace("000002", "1000000")] = blob  # lacks a file, and names step 2
    files["checkpoints/000777/training_state/data.json"] = Blob(b"{}", False)  # no manifest
    pushed.commit("somebody was here", files, "checkpoints")
    said = ptrain("resume", "--from_hub", "user/run", "--steps", 3, "--output_dir", "mine")
    assert "skipped user/run: checkpoint 1000000 holds the manifest of step 2" in said
    assert "fetching checkpoint 2 of user/run into mine" in said


def test_wrong_ways_to_resume_from_the_hub_are_refused(hub, ptrain, pushed, capsys):
    def fails(*words):
        assert run(["resume", *words]) == 2
        return capsys.readouterr().err

    assert "path is missing: name the run to resume." in fails()
    assert "from_hub needs a value. Use --from_hub user/run." in fails("--from_hub", "--steps", "5")
    with pytest.raises(SystemExit):
        run(["resume", "--from_hub", "user/run", "--help"])
    assert not (ptrain.folder / "outputs").exists()  # nothing is fetched to say what flags mean
    assert "= 'run' is not a name on the Hub" in fails("--from-hub=run")
    assert "'run' is to be resumed as well" in fails("run", "--from_hub", "user/run")
    assert "= 'run' is not a name on the Hub" in fails("--from_hub", "run")
    assert "HTTP 404" in fails("--from_hub", "user/nothing")
    assert "does not hold a complete checkpoint" in fails("--from_hub", "user/run@main")
    ptrain("resume", "run", "--steps", 4, "--publish.no-enable", "--publish.no-push_checkpoints")
    said = fails("--from_hub", "user/run", "--output_dir", "run")
    assert "holds a checkpoint of step 4, but the newest at user/run is of step 2" in said
    assert "ptrain resume run" in said


def test_the_publish_section_survives_the_file(tmp_path):
    from parallel_config.codec import parse
    from parallel_train.config import SCHEMA

    config = TrainConfig(
        publish=PublishConfig(enable=True, repo_id="user/run", tags=("a", "b"), timeout_s=5),
        checkpoint=CheckpointConfig(save_freq=3),
    )
    loaded = SCHEMA.from_document(
        parse(SCHEMA.dump(config), source="file"), source="file", trusted=False
    )
    assert loaded.config == config
