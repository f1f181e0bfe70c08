"""Where a run starts: what `--resume never | auto | must` does with what lies in the folder."""

import contextlib
import io
import json
import os
import shlex
import shutil

import pytest

from parallel_ckpt import DamagedCheckpoint
from parallel_ckpt.formats.hashing import hash_bytes
from parallel_ckpt.layout import RunFolder
from parallel_ckpt.store.lock import RunLock
from parallel_ckpt.store.manifest import signed_text
from parallel_config import ConfigError
from parallel_testing.ranks import run_ranks
from parallel_train.cli import app
from parallel_train.cli import train as training
from parallel_train.cli.parsing import parse
from parallel_train.config import read_config
from parallel_train.data.config import EMBEDDED_ROOT
from parallel_train.data.metadata import read_metadata
from parallel_train.policies.loading import load_policy
from parallel_train.run import start
from parallel_train.run.job import Job
from parallel_train.run.signals import StopRequest
from parallel_train.run.start import decide_job
from parallel_train.train import train

SMALL = shlex.split(
    "--policy.dim_model 32 --policy.dim_feedforward 64 --policy.n_vae_layers 1 "
    "--dataset.episodes 0 --batch_size 4 --log_freq 1000 --steps 6 --checkpoint.save_freq 2"
)


def job(*flags, resume="auto"):
    return Job(config=parse(["train", *SMALL, *map(str, flags)]).command.run, resume=resume)


def decide(*flags, resume="auto"):
    return decide_job(job(*flags, resume=resume), world_size=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run folder with the checkpoints of steps 2, 4 and 6."""
    path = tmp_path_factory.mktemp("finished") / "run"
    before = os.environ.get("PARALLEL_DEVICE")
    os.environ["PARALLEL_DEVICE"] = "cpu"
    try:
        train(job("--output_dir", path, resume="never"), StopRequest())
    finally:
        os.environ.pop("PARALLEL_DEVICE")
        if before is not None:
            os.environ["PARALLEL_DEVICE"] = before
    return path


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it that may be damaged."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def damage(run, step):
    path = run / f"checkpoints/{step:06d}/pretrained_model/model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_auto_starts_afresh_where_there_is_nothing(tmp_path):
    assert decide("--output_dir", tmp_path / "new").checkpoint is None
    # Killed before its first checkpoint: a folder, but nothing to lose.
    (tmp_path / "begun/checkpoints/.000002.tmp-abc").mkdir(parents=True)
    decided = decide("--output_dir", tmp_path / "begun")
    assert decided.checkpoint is None
    assert any("left by a save that did not finish" in note for note in decided.notes)


def test_auto_takes_the_newest_intact_and_names_what_it_skipped(run):
    assert decide("--output_dir", run).checkpoint == run / "checkpoints/000006"
    damage(run, 6)
    (run / "checkpoints/000004/training_state/data.json").unlink()
    decided = decide("--output_dir", run)
    assert decided.checkpoint == run / "checkpoints/000002"
    skipped = [note for note in decided.notes if note.startswith("skipped")]
    assert skipped[0].startswith(f"skipped {run}/checkpoints/000006: ")
    assert skipped[0].count(f"{run}/checkpoints/000006: ") == 1
    assert "pretrained_model/model.safetensors has checksum" in skipped[0]
    assert f"skipped {run}/checkpoints/000004: " in skipped[1]
    assert "training_state/data.json" in skipped[1]


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_damage_everywhere_is_refused_not_written_over(run, mode):
    for step in (2, 4, 6):
        damage(run, step)
    with pytest.raises(ConfigError) as refused:
        decide("--output_dir", run, resume=mode)
    text = str(refused.value)
    assert f"output_dir = '{run}' does not hold an intact checkpoint to resume." in text
    assert "Repair these, or move them away to start a new run." in text
    assert all(f"skipped {run}/checkpoints/{step:06d}: " in text for step in (2, 4, 6))
    for step in (2, 4, 6):
        shutil.rmtree(run / f"checkpoints/{step:06d}")
    assert decide("--output_dir", run).checkpoint is None


def test_a_damaged_checkpoint_that_was_named_is_refused(run):
    damage(run, 4)
    named = Job(config=job().config, resume="must", checkpoint=run / "checkpoints/000004")
    with pytest.raises(ConfigError, match=r"model\.safetensors has checksum"):
        train(named, StopRequest())
    assert decide("--output_dir", run).checkpoint == run / "checkpoints/000006"


def test_a_damaged_config_is_not_what_a_run_goes_on_with(run):
    """Of a run folder the newest config that is intact counts, as with the weights."""
    path = run / "checkpoints/000006/pretrained_model/train_config.json"
    text = path.read_text()
    path.write_text(text.replace('"lr": 0.001', '"lr": 0.009'))
    assert path.read_text() != text
    assert parse(["resume", str(run)]).command.run.optimizer.lr == 0.001
    path.unlink()
    assert parse(["resume", str(run)]).command.run.steps == 6


def begun(*words, ranks=1):
    """What `train` with these words would decide, presence and all."""
    return decide_job(training.job_of(parse(["train", *map(str, words)])), world_size=ranks)


def test_auto_goes_on_with_the_checkpoints_config(run, tmp_path):
    """Flags over the file over the checkpoint over defaults, each by presence."""
    auto = "--output_dir", run, "--resume", "auto"
    found = begun(*auto, "--steps", 8).config
    assert (found.steps, found.batch_size, found.policy.dim_model) == (8, 4, 32)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"steps": 9, "optimizer": {"lr": 0.5}, "log_freq": 3}))
    found = begun(*auto, "--config", file, "--log_freq", 5).config
    assert (found.steps, found.optimizer.lr, found.log_freq, found.batch_size) == (9, 0.5, 5, 4)
    assert found.policy.dim_model == 32
    fresh = begun("--output_dir", tmp_path / "new", "--resume", "auto", "--config", file).config
    assert (fresh.steps, fresh.batch_size) == (9, 32)


def test_degrees_that_are_new_in_the_file_are_given_like_flags(run, tmp_path):
    auto = "--output_dir", run, "--resume", "auto", "--batch_size", 2, "--allow_batch_change"
    file = tmp_path / "mine.toml"
    file.write_text("[parallelism]\ndp_shard = 2\n")
    with pytest.raises(ConfigError, match="dp_shard"):
        begun(*auto, "--config", file)
    assert begun(*auto).topology.world_size == 1
    assert begun(*auto, "--config", file, ranks=2).topology.dp_shard == 2
    # The degrees that it had at the start were meant for the ranks of then.
    as_of(run, dp_replicate=1, dp_shard=4)
    file.write_text("[parallelism]\ndp_shard = 4\n")
    found = begun(*auto, "--config", file, ranks=2).topology
    assert (found.dp_replicate, found.dp_shard) == (1, 2)


def as_of(run, **parallelism):
    """The newest checkpoint as if its run had had these degrees."""
    newest = run / "checkpoints/000006"
    config = newest / "pretrained_model/train_config.json"
    document = json.loads(config.read_text())
    document["parallelism"] |= parallelism
    document["accelerator"]["gradient_accumulation"]["sync_each_batch"] = True
    config.write_text(json.dumps(document))
    path = newest / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["topology"] |= parallelism
    manifest["provenance"] |= {f"declared_{name}": value for name, value in parallelism.items()}
    for record in manifest["files"]:
        if record["path"] == "pretrained_model/train_config.json":
            data = config.read_bytes()
            record |= {"checksum": hash_bytes(data), "size_bytes": len(data)}
    path.write_text(signed_text(manifest))


def test_a_degree_that_is_given_goes_with_the_default_of_the_other(run):
    """Not with the one that was resolved for the ranks of then: 8 replicas are no FSDP."""
    as_of(run, dp_replicate=4, dp_shard=1)
    auto = "--output_dir", run, "--resume", "auto", "--batch_size", 4
    for degree in (-1, 4):
        found = begun(*auto, "--parallelism.dp_shard", degree, ranks=4).topology
        assert (found.dp_replicate, found.dp_shard) == (1, 4)


def test_the_rest_of_the_accumulation_stays_when_its_steps_are_fitted(run):
    as_of(run, dp_replicate=1, dp_shard=4)
    found = begun("--output_dir", run, "--resume", "auto", ranks=2).config.accelerator
    assert found.gradient_accumulation.steps == 2
    assert found.gradient_accumulation.sync_each_batch


def test_a_mapping_in_the_file_replaces_the_checkpoints(run, tmp_path):
    file = tmp_path / "mine.json"
    rename = {"observation.state": "observation.body"}
    auto = "--output_dir", run, "--resume", "auto", "--config", file
    file.write_text(json.dumps({"dataset": {"rename": rename}}))
    below = parse(["train", *map(str, auto)]).command.run.dataset
    assert (below.rename, below.episodes) == (rename, (0,))
    file.write_text(json.dumps({"dataset": {"rename": {}}}))
    assert parse(["train", *map(str, auto)]).command.run.dataset.rename == {}


def test_must_needs_something_to_continue(tmp_path):
    with pytest.raises(ConfigError, match="Use --resume auto to start a new run in that case"):
        decide("--output_dir", tmp_path / "new", resume="must")


def test_never_refuses_a_folder_that_holds_a_run(run):
    with pytest.raises(ConfigError, match="already holds a run") as refused:
        decide("--output_dir", run, resume="never")
    assert f"Continue it with `ptrain resume {run}` or --resume auto" in str(refused.value)


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_a_run_without_a_folder_of_its_own_cannot_be_continued(mode):
    with pytest.raises(ConfigError, match=f"output_dir = None with --resume {mode}: "):
        decide(resume=mode)


class ReleasesWhenTold(io.StringIO):
    """Stands for the former process: it ends as soon as the new one says that it waits."""

    def __init__(self, lock):
        super().__init__()
        self.lock = lock

    def write(self, text):
        if "waiting" in text:
            self.lock.release()
        return super().write(text)


def test_a_requeued_job_lets_the_former_one_finish_its_save(run):
    lock, _ = RunLock.acquire(RunFolder(run).lock)
    with contextlib.redirect_stdout(ReleasesWhenTold(lock)) as said:
        assert decide("--output_dir", run).checkpoint == run / "checkpoints/000006"
    assert said.getvalue().count("waiting up to 120 s for the run's writer") == 1
    assert f"process {os.getpid()} on " in said.getvalue()


def test_two_jobs_for_one_run_end_with_an_error_that_names_the_other(run, monkeypatch):
    monkeypatch.setattr(start, "WRITER_S", 0.5)
    lock, _ = RunLock.acquire(RunFolder(run).lock)
    try:
        with pytest.raises(ConfigError, match=f"is held by process {os.getpid()} on "):
            decide("--output_dir", run)
    finally:
        lock.release()


def test_a_signal_before_the_first_update_keeps_the_run_as_it_was(run):
    stop = StopRequest()
    with stop:
        os.kill(os.getpid(), 15)
        outcome = train(job("--output_dir", run, "--steps", 8), stop)
    assert (outcome.step, outcome.preempted) == (6, True)
    assert decide("--output_dir", run).checkpoint == run / "checkpoints/000006"


@pytest.fixture
def from_a_newer_version(finished, tmp_path):
    """A copy of the run whose files hold fields that this version does not have."""
    path = tmp_path / "run"
    shutil.copytree(finished, path, symlinks=True)
    for step in (*(path / "checkpoints").glob("0*"), path):
        config = step / "pretrained_model" / "train_config.json"
        config = config if config.exists() else step / "train_config.json"
        document = json.loads(config.read_text())
        document["optimizer"]["nesterov"] = True
        document["policy"]["registers"] = 4
        document["tokenizer"] = {"words": 9}
        data = json.dumps(document).encode()
        config.write_bytes(data)
        manifest = step / "manifest.json"
        if manifest.exists():
            record = json.loads(manifest.read_text())
            for file in record["files"]:
                if file["path"].endswith("train_config.json"):
                    file |= {"size_bytes": len(data), "checksum": hash_bytes(data)}
            manifest.write_text(signed_text(record))
    return path


LEFT_OUT = [
    "optimizer.nesterov = true is left out: this version does not have this field.",
    "policy.registers = 4 is left out: this version does not have this field.",
    'tokenizer = {"words": 9} is left out: this version does not have this field.',
]


@pytest.mark.parametrize("way", ["resume", "auto"])
def test_a_newer_versions_run_goes_on_and_names_what_is_left_out(from_a_newer_version, way, capsys):
    """BC-16b: no dead end; what the newer version wrote stays as it is."""
    path = from_a_newer_version
    before = {file: file.read_bytes() for file in path.rglob("*.json") if file.is_file()}
    if way == "resume":
        parsed = parse(["resume", str(path), "--steps", "8"])
        work = Job(config=parsed.command.run, resume="must", checkpoint=path, notes=parsed.notes)
    else:
        work = job("--output_dir", path, "--steps", 8)
    assert train(work, StopRequest()).step == 8
    said = capsys.readouterr().out
    assert [said.count(line) for line in LEFT_OUT] == [1, 1, 1]
    after = {file: file.read_bytes() for file in before}
    changed = {file for file in before if after[file] != before[file]}
    assert changed <= {path / "train_config.json"}
    kept = (path / "train_config.until-000006.json").read_bytes()
    assert kept == before[path / "train_config.json"]
    assert json.loads((path / "train_config.json").read_text())["steps"] == 8


def test_a_slip_in_a_users_own_file_stays_an_error(from_a_newer_version, capsys):
    file = from_a_newer_version / "train_config.json"
    assert app.run(["train", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert "optimizer.nesterov is not a field." in said
    assert "policy.registers is not a field." in said
    assert app.run(["resume", str(from_a_newer_version), "--print_config"]) == 0
    assert sorted(capsys.readouterr().err.splitlines()) == LEFT_OUT


def test_a_newer_policy_is_refused_where_it_would_act(from_a_newer_version, tmp_path):
    """Its outputs could differ without a warning; the error names a way out instead."""
    model = from_a_newer_version / "checkpoints/000006/pretrained_model"
    config = shutil.copytree(model, tmp_path / "model") / "config.json"  # no manifest knows it
    document = json.loads(config.read_text())
    config.write_text(json.dumps(document | {"registers": 4}))
    with pytest.raises(ConfigError, match="registers is not a field") as caught:
        load_policy(config.parent)
    assert "a newer release may have written it. Upgrade the packages then." in str(caught.value)


def test_a_byte_order_mark_in_a_json_that_a_person_edited_is_accepted(finished, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(finished / "checkpoints/000006/pretrained_model", model)
    data = tmp_path / "data"
    shutil.copytree(EMBEDDED_ROOT, data)
    files = [*model.glob("*.json"), *data.rglob("*.json")]
    assert {"config.json", "preprocessor.json", "info.json"} <= {file.name for file in files}
    for file in files:
        file.write_bytes(file.read_bytes().decode().encode("utf-8-sig"))
    assert load_policy(model).config == load_policy(finished).config
    assert read_metadata(data).spec == read_metadata(EMBEDDED_ROOT).spec
    assert read_config(model / "train_config.json", trusted=False).config.steps == 6
    (model / "config.json").write_bytes((model / "config.json").read_text()[1:].encode("utf-16"))
    with pytest.raises(ConfigError, match=r"config.json is not UTF-8 text: .* Save it as UTF-8"):
        load_policy(model)


def test_a_flipped_bit_is_not_evaluated(run):
    load_policy(run)
    weights = next((run / "checkpoints/000006").rglob("model*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for path in (run, weights.parent):
        with pytest.raises(DamagedCheckpoint, match=r"model.safetensors .*checksum"):
            load_policy(path)


def load_on_main(folder):
    import torch.distributed as dist

    return len(load_policy(folder).model.state_dict()) if dist.get_rank() == 0 else 0


def test_one_rank_may_load_a_policy_by_itself(finished):
    first, second = run_ranks(load_on_main, 2, finished, timeout_s=100)
    assert first > second


def resumed(path, *flags):
    command = parse(["resume", str(path), *map(str, flags)]).command
    return Job(
        config=command.run,
        resume="must",
        checkpoint=path,
        allow_optimizer_change=command.allow_optimizer_change,
    )


def test_another_optimizer_is_refused_unless_it_may_start_anew(run, monkeypatch, capsys):
    monkeypatch.setenv("PARALLEL_DEVICE", "cpu")
    other = ("--optimizer.type", "sgd", "--steps", "8")
    words = r"optimizer\.type = 'sgd', but .* 'adamw'\. Use --optimizer\.type adamw, or --allow_opt"
    with pytest.raises(ConfigError, match=words):
        decide_job(resumed(run, *other), world_size=1)  # before anything is built
    assert train(resumed(run, *other, "--allow_optimizer_change"), StopRequest()).step == 8
    assert "adamw.AdamW -> torch.optim.sgd.SGD, whose state starts anew" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_name_its_optimizer_is_judged_by_its_config(run):
    for step in (run / "checkpoints").glob("0*"):
        path = step / "manifest.json"
        document = json.loads(path.read_text()) | {"format_version": 1}
        for name in ("optimizer", "parent", "base_model", "manifest_checksum"):
            del document[name]
        for name in ("ring_degree", "ulysses_degree"):
            del document["topology"][name]
        path.write_text(signed_text(document))
    with pytest.raises(ConfigError, match=r"optimizer\.type = 'sgd'.* holds the state of 'adamw'"):
        decide_job(resumed(run, "--optimizer.type", "sgd"), world_size=1)
    changed = resumed(run, "--optimizer.type", "sgd", "--allow_optimizer_change")
    assert decide_job(changed, world_size=1).allow_optimizer_change
    same = resumed(run, "--allow_optimizer_change")
    assert not decide_job(same, world_size=1).allow_optimizer_change


def test_the_checkpoint_that_a_run_goes_on_from_is_kept(run, monkeypatch, capsys):
    monkeypatch.setenv("PARALLEL_DEVICE", "cpu")
    at = run / "checkpoints/000002"
    train(resumed(at, "--checkpoint.keep_last", 2, "--steps", 3), StopRequest())
    assert RunFolder(run).committed_steps() == [2, 3]
    assert "deleting 000004, 000006: the run does not go on from there" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["last", "000006"])
def test_a_checkpoint_that_was_moved_aside_has_its_name_back_before_it_is_read(run, name):
    folder = RunFolder(run)
    # As a save that was killed between the two renames of a replacement leaves it.
    folder.step(6).path.rename(folder.hidden(6, "old", "a"))
    decided = decide_job(resumed(run / "checkpoints" / name), world_size=1)
    assert decided.checkpoint == folder.step(6).path
    assert decided.checkpoint.is_dir()
    assert any("000006: put back" in note for note in decided.notes)
