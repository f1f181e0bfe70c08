"""The command line: every spelling that is promised, and every wrong input as one block."""

import importlib.metadata
import json
import time

import pytest

from parallel_config import ConfigError
from parallel_config.codec import parse as parse_document
from parallel_train.cli import hints
from parallel_train.cli.app import run
from parallel_train.cli.commands import TrainCommand
from parallel_train.cli.flags import flag_table, normalize, positionals
from parallel_train.cli.launcher import without_flags
from parallel_train.cli.parsing import _flags, parse
from parallel_train.config import SCHEMA, TrainConfig

PROMISED = [
    "policy.dropout",
    "policy.use_vae",
    "dataset.root",
    "steps",
    "batch_size",
    "seed",
    "log_freq",
    "output_dir",
    "optimizer.lr",
    "checkpoint.save_freq",
    "checkpoint_format",
    "parallelism.dp_replicate",
    "parallelism.dp_shard",
    "accelerator.mixed_precision",
    "accelerator.gradient_accumulation.steps",
]


def config(*words):
    return parse(["train", *words]).command.run


def test_promised_spellings_of_flags_stay():
    assert set(PROMISED) <= flag_table(TrainConfig()).keys()
    parsed = parse(["train", "--policy.type", "act", "--policy.dropout", "0.3"])
    assert (parsed.command.policy_type, parsed.command.run.policy.dropout) == ("act", 0.3)


def test_the_flags_are_those_of_the_config():
    """A field cannot come or go without the surface changing on purpose."""
    flags = sorted(flag_table(TrainConfig()))
    assert len(flags) == len(set(flags))
    assert {name.split(".")[0] for name in flags} == {
        "policy", "dataset", "output_dir", "steps", "batch_size", "seed", "log_freq", "optimizer",
        "scheduler", "parallelism", "accelerator", "checkpoint_format", "checkpoint",
        "ema", "eval", "logging", "publish", "meta_init",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], True),
        (["--policy.use_vae"], True),
        (["--policy.no_use_vae"], False),
        (["--policy.no-use-vae"], False),
        (["--no-policy.use_vae"], False),
        (["--no_policy.use_vae"], False),
        (["--policy.use_vae", "false"], False),
        (["--policy.use_vae", "True"], True),
        (["--policy.use-vae=false"], False),
        (["--policy.use_vae=TRUE"], True),
        (["--policy.use_vae", "false", "--policy.use_vae"], True),
    ],
)
def test_every_spelling_of_a_boolean_is_read(words, value):
    assert config(*words).policy.use_vae is value


@pytest.mark.parametrize("word", ["0", "1", "yes", ""])
def test_only_true_and_false_are_boolean_words(word):
    with pytest.raises(ConfigError, match="a boolean takes true, false or no value"):
        config(f"--policy.use_vae={word}")


def test_a_positional_after_a_bare_boolean_stays_one():
    flags = {"json": 0, "steps": 1, "names": -1, "betas": 2}
    assert normalize(["--json", "run"], flags) == ["--json", "run"]
    assert positionals(["--json", "run"], flags) == ["run"]
    assert positionals(["--json", "true", "run"], flags) == ["run"]
    assert positionals(["--steps", "4", "run", "--betas", "0.1", "0.2"], flags) == ["run"]
    assert positionals(["--betas", "None", "--steps", "4", "run"], flags) == ["run"]
    assert positionals(["run", "--names", "a", "b"], flags) == ["run"]


@pytest.mark.parametrize("words", [["--parallelism.dp_shard", "-1"], ["--parallelism.dp-shard=-1"]])
def test_a_degree_of_minus_one_is_a_value_and_not_a_flag(words):
    assert config(*words).parallelism.dp_shard == -1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume", ""], "path = '' is empty. Name a folder."),
        (["resume", " "], "path = ' ' is empty. Name a folder."),
        (["resume", "--from_hub", ""], "from_hub = '' is not a name on the Hub."),
        (["resume", "--from_hub", "user/run@"], "from_hub = 'user/run@' is not a name on the Hub."),
        (["inspect", ""], "path = '' is empty. Name a folder."),
        (["verify", ""], "path = '' is empty. Name a folder."),
        (["convert", ""], "path = '' is empty. Name a folder."),
        (["evaluate", ""], "path = '' is empty. Name a folder."),
        (["report", ""], "path = '' is empty. Name a folder."),
        (["publish", "", "--repo_id", "a/b"], "path = '' is empty. Name a folder."),
        (["publish", "x", "--repo_id", ""], "repo_id = '' is empty. Give --repo_id a value."),
        (["publish", "x", "--repo_id", "a/b", "--revision="], "Give --revision a value, or leave"),
        (["convert", "x", "--output", ""], "output = '' is empty. Give --output a value, or leave"),
        (["convert", "x", "--push_to_hub", ""], "push_to_hub = '' is empty."),
        (["evaluate", "x", "--output", ""], "output = '' is empty."),
        (["evaluate", "x", "--policy.type", ""], "policy.type = '' is empty. Give --policy.type"),
        (["doctor", "--output_dir", ""], "output_dir = '' is empty."),
        (["train", "--config", ""], "config = '' is empty. Give --config a value, or leave it out"),
        (["plan", "--config", ""], "config = '' is empty."),
        (["train", "--policy.type", ""], "policy.type = '' is empty."),
        (["train", "--output_dir", ""], "output_dir = '' is not a folder."),
        (["train", "--dataset.root", ""], "dataset.root"),
        (["train", "--publish.repo_id", ""], "publish.repo_id = '' is not a name on the Hub"),
        (["train", "--publish.revision", ""], "publish.revision = '' is not the name of a branch"),
        (["train", "--publish.base_model", ""], "publish.base_model = '' is not a name on the Hub"),
    ],
)
def test_an_empty_word_is_refused_as_a_path_and_as_a_name(words, message, capsys):
    """It mostly comes of a variable that is not set; the current folder is never meant."""
    assert run(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[1].startswith(message) or message in said[1]


@pytest.mark.parametrize("ranks", ["0", "-3", "1000000", "9999999999999"])
def test_a_plan_for_an_impossible_number_of_ranks_is_refused(ranks, capsys):
    assert run(["plan", f"--world_size={ranks}"]) == 2
    said = capsys.readouterr().err
    assert f"world_size = {int(ranks):,}, but it must be from 1 to 131,072." in said
    assert "Use --world_size 64." in said


@pytest.mark.parametrize("degrees", [(1, -1), (16, 8192), (16384, 8)])
def test_a_plan_for_the_largest_cluster_takes_seconds(degrees, capsys):
    replicate, shard = (str(degree) for degree in degrees)
    words = ["--parallelism.dp_replicate", replicate, "--parallelism.dp_shard", shard]
    began = time.monotonic()
    assert run(["plan", "--world_size", "131072", *words]) == 0
    assert time.monotonic() - began < 60  # 10 s at most here; it took hours
    assert "131072 rank(s)" in capsys.readouterr().out


def test_a_list_takes_several_words_and_none_clears_a_value():
    assert config("--accelerator.fsdp.wrap_modules", "A", "B").accelerator.fsdp.wrap_modules == (
        "A",
        "B",
    )
    assert config("--accelerator.fsdp.wrap_modules", "None").accelerator.fsdp.wrap_modules is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("", None),
        ("--accelerator.tf32", True),
        ("--accelerator.tf32 --steps 5", True),
        ("--accelerator.no_tf32", False),
        ("--no-accelerator.tf32", False),
        ("--accelerator.tf32 false", False),
        ("--accelerator.tf32=true", True),
        ("--accelerator.tf32 None", None),
        ("--accelerator.no-tf32 --accelerator.tf32=None", None),
    ],
)
def test_a_boolean_that_may_be_left_open_is_given_like_any_other(words, value):
    assert config(*words.split()).accelerator.tf32 is value
    assert config("--output_dir", "None").output_dir is None
    assert config("--output_dir", "~/x").output_dir.endswith("/x")
    assert "~" not in config("--output_dir", "~/x").output_dir


def test_flags_go_over_the_file_by_presence(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 7\nseed = 3\n[policy]\ntype = 'act'\ndim_model = 64\n")
    # 400 is the default: it wins over the file all the same, since it is present.
    found = config("--config", str(file), "--steps", "400", "--policy.dropout", "0.2")
    assert (found.steps, found.seed) == (400, 3)
    assert (found.policy.dim_model, found.policy.dropout) == (64, 0.2)


def test_print_config_prints_what_would_run(capsys):
    assert run(["train", "--print_config", "--steps", "5"]) == 0
    text = capsys.readouterr().out
    document = parse_document(text, source="printed")
    loaded = SCHEMA.from_document(document, source="printed", trusted=True)
    assert loaded.config == config("--steps", "5")
    assert json.loads(text)["schema_version"] == SCHEMA.version


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "1e3"], "--steps"),
        (["--steps"], "--steps"),
        (["--checkpoint_format", "zip"], "safetensors_dcp"),
    ],
)
def test_words_that_do_not_parse_exit_with_2(words, expected, capsys):
    with pytest.raises(SystemExit) as caught:
        run(["train", *words])
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "0", "--optimizer.lr", "-1"], ["steps = 0", "optimizer.lr = -1.0"]),
        (["--policy.type", "acd"], ["Registered: act", "Did you mean 'act'?"]),
        (["--policy.type", "no_such:Policy"], ["cannot be imported"]),
        (["--config", "missing.json"], ["missing.json cannot be read"]),
        (["--config", "run.yaml"], ["is YAML"]),
        (["--output_dir", ""], ["output_dir = ''"]),
        (["--accelerator.fsdp.wrap_modules", "A,B"], ["--accelerator.fsdp.wrap_modules A B"]),
        (["--parallelism.context_parallel.ring_degree", "2"], ["not available"]),
    ],
)
def test_wrong_values_are_reported_in_one_block_and_exit_with_2(words, expected, capsys):
    assert run(["train", *words]) == 2
    text = capsys.readouterr().err
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--lr 3", "--lr is not a flag of `ptrain train`. Use --optimizer.lr."),
        ("--learning_rate=3", "Use --optimizer.lr."),
        ("--scheduler.num_warmup_steps 3", "Use --scheduler.warmup_steps."),
        ("--per-device-train-batch-size 3", "Use --batch_size."),
        ("--policy.push_to_hub", "Use --publish.enable."),
        ("--num_train_epochs 3", "A run counts optimizer updates: use --steps."),
        ("--stpes 3", "Did you mean --steps?"),
        ("--policy.dropuot 3", "Did you mean --policy.dropout?"),
        ("--weight_decay 3", "Did you mean --optimizer.weight_decay?"),
        ("--dataset.qwerty 3", "`--help` lists all flags."),
        ("--no-accelerator.tf23", "Did you mean --accelerator.tf32?"),
        ("positional", "positional does not belong to any flag. Names of flags begin with --."),
        ("--accelerator.tf32 yes", "--accelerator.tf32 = 'yes', but a boolean takes true, "
         "false or no value. Use --accelerator.tf32 or --accelerator.tf32 false."),
    ],
)  # fmt: skip
def test_a_flag_that_does_not_exist_is_met_with_the_one_that_does(words, hint, capsys):
    assert run(["train", *words.split()]) == 2
    assert hint in capsys.readouterr().err


def test_every_name_of_another_tool_leads_to_a_flag_that_exists():
    flags = _flags(TrainCommand())
    assert {ours.split(" ")[0] for ours in hints._SAME} <= flags.keys()
    assert not set(hints._NAMES) & flags.keys()
    assert not set(hints._EXPLAINED) & flags.keys()


def test_a_run_folder_as_config_says_both_ways_to_use_it(tmp_path, capsys):
    (tmp_path / "train_config.json").write_text("{}")
    assert run(["train", "--config", str(tmp_path)]) == 2
    assert (
        f"config = '{tmp_path}' is a folder. Use --config {tmp_path}/train_config.json for a new "
        f"run with its config, or `ptrain resume {tmp_path}` to go on with it."
    ) in capsys.readouterr().err


WAM_6B = ["--policy.type", "wam", "--policy.preset", "6b"]


def test_defaults_of_a_run_follow_its_preset_below_flags_and_files(tmp_path):
    found = config(*WAM_6B)
    assert (found.steps, found.optimizer.lr, found.optimizer.betas) == (100_000, 1e-4, (0.9, 0.95))
    assert (found.scheduler.warmup_steps, found.scheduler.min_lr_ratio) == (2_000, 0.1)
    over = config(*WAM_6B, "--optimizer.lr=0.001", "--scheduler.warmup-steps", "7")
    assert (over.optimizer.lr, over.scheduler.warmup_steps, over.steps) == (1e-3, 7, 100_000)
    assert parse(["plan", *WAM_6B]).command.run.optimizer.lr == 1e-4
    assert config("--policy.type", "wam").optimizer.lr == 1e-3
    file = tmp_path / "run.toml"
    file.write_text("steps = 7\n[policy]\ntype = 'wam'\npreset = '1b'\n[optimizer]\nlr = 0.5\n")
    found = config("--config", str(file))
    assert (found.steps, found.optimizer.lr, found.scheduler.warmup_steps) == (7, 0.5, 1_000)


def test_defaults_that_follow_a_preset_are_said():
    (line,) = parse(["train", *WAM_6B, "--steps", "9"]).notes
    assert line == (
        "defaults of wam 6b: optimizer.lr 0.0001, optimizer.betas 0.9 0.95, optimizer.weight_decay "
        "0.01, scheduler.warmup_steps 2000, scheduler.min_lr_ratio 0.1 (flags and files override "
        "them)"
    )


def test_every_problem_of_a_config_file_is_reported_at_once(tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text('{"stpes": 5, "policy": {"type": "act", "dropuot": 1}, "seed": "x"}')
    assert run(["train", "--config", str(file)]) == 2
    text = capsys.readouterr().err
    assert f"{file}: 3 problems" in text
    assert "stpes is not a field. Did you mean 'steps'?" in text
    assert "policy.dropuot is not a field. Did you mean 'dropout'?" in text


def test_the_version_is_one_line(capsys):
    assert run(["--version"]) == 0
    version = importlib.metadata.version("parallel-train")
    assert capsys.readouterr().out == f"ptrain {version}\n"


def test_launch_flags_do_not_reach_the_workers():
    words = ["train", "--nproc_per_node", "2", "--steps", "3", "--grace-s=5"]
    assert without_flags(words, ("nproc_per_node", "grace_s")) == ["train", "--steps", "3"]


def test_doctor_says_that_training_can_run_and_lists_the_packages(capsys):
    assert run(["doctor"]) == 0
    assert "Training can run here." in capsys.readouterr().out
    assert run(["doctor", "--json"]) == 0
    assert {"torch", "accelerate"} <= {f["name"] for f in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("flags", "states"),
    [
        ([], 2),
        (["--ema.decay", "0.99"], 3),
        (["--optimizer.type", "sgd"], 1),
        (["--optimizer.type", "sgd", "--optimizer.betas", "0", "0"], 0),
    ],
)
def test_a_plan_counts_what_the_optimizer_keeps(capsys, flags, states):
    assert run(["plan", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimizer_bytes"] == states * found["grad_bytes"] > -1
