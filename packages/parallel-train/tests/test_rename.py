"""`--dataset.rename`: the policy reads a dataset under other names, also once it is loaded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from parallel_config import ConfigError
from parallel_testing.hub_fixture import CLIENT_WARNING, local_hub  # noqa: F401
from parallel_testing.programs import run_ptrain
from parallel_train.cli.app import run
from parallel_train.cli.flags import positionals
from parallel_train.cli.parsing import parse, resume_flags
from parallel_train.data.config import EMBEDDED_ROOT, DatasetConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.metadata import read_metadata
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.loading import load_policy
from parallel_train.policies.processors import Preprocessor

pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)
DATA = Path(__file__).parent / "data"
VIDEO, STATE_ONLY = DATA / "lerobot_v3_video", DATA / "lerobot_v3_state"
STATE, TOP, FRONT = "observation.state", "observation.images.top", "observation.images.front"
SMALL = [
    *["--steps", "3", "--batch_size", "4", "--log_freq", "1000", "--seed", "3"],
    *["--policy.dim_model", "32", "--policy.dim_feedforward", "64", "--policy.n_vae_layers", "1"],
]


def ptrain(*words: Any, code: int = 0) -> str:
    """The command in a process of its own; what it printed."""
    return run_ptrain(*words, cwd=".", code=code, timeout_s=300)


def copy_named(source: Path, root: Path, names: dict[str, str]) -> Path:
    """The dataset as it would be, had it been recorded with other names."""
    for path in source.rglob("*"):
        if not path.is_file():
            continue
        target = root / "/".join(names.get(p, p) for p in path.relative_to(source).parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            table = pq.read_table(path, partitioning=None)
            columns = ["/".join(names.get(p, p) for p in n.split("/")) for n in table.column_names]
            pq.write_table(table.rename_columns(columns), target)
        elif path.suffix == ".json":
            plain = json.loads(path.read_text())
            if path.name == "info.json":
                plain["features"] = {names.get(n, n): f for n, f in plain["features"].items()}
            else:
                plain = {names.get(n, n): entry for n, entry in plain.items()}
            target.write_text(json.dumps(plain))
        else:
            target.write_bytes(path.read_bytes())
    return root


def model_of(folder: Path) -> Path:
    return folder / "checkpoints/last/pretrained_model"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--dataset.rename", "a=b", "observation.c=d"], {"a": "b", "observation.c": "d"}),
        (["--dataset.rename=a=b"], {"a": "b"}),
        (["--dataset.rename", '{"a": "b", "c": "d"}'], {"a": "b", "c": "d"}),
        (["--dataset.rename", "a=b", "--dataset.rename", "c=d"], {"c": "d"}),
        (["--dataset.rename", "--steps", "7"], {}),
        ([], {}),
    ],
)
def test_pairs_and_json_are_read_on_the_command_line(
    words: list[str], found: dict[str, str]
) -> None:
    assert parse(["train", *words]).command.run.dataset.rename == found
    assert positionals([*words, "--steps", "3", "run"], resume_flags()) == ["run"]


def test_flags_replace_the_mapping_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[dataset.rename]\n"observation.images.front" = "observation.images.top"\n')
    words = ["train", "--config", str(file)]
    assert parse(words).command.run.dataset.rename == {FRONT: TOP}
    assert parse([*words, "--dataset.rename"]).command.run.dataset.rename == {}
    assert parse([*words, "--dataset.rename", "a=b"]).command.run.dataset.rename == {"a": "b"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("front", "'front' is not a pair OLD=NEW"),
        ('{"a": 1}', "'a' is given 1, but a name is a text"),
        ('{"a": "b", "a": "c"}', "'a' is given twice"),
        ('{"a"', "Expecting ':' delimiter"),
    ],
)
def test_words_that_are_not_a_mapping_are_refused(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["train", "--dataset.rename", word])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (
            {"observation.image.top": "x"},
            r"dataset.rename names 'observation.image.top', which '.*' does not have. Did you mean "
            r"'observation.images.top'\? It has: action, observation.images.top, observation.state",
        ),
        (
            {STATE: "observation.x", TOP: "observation.x"},
            r"makes 'observation.x' the name of 'observation.state' and of 'observation.images.top'"
            r"|makes 'observation.x' the name of 'observation.images.top' and of 'observation.sta",
        ),
        ({TOP: STATE}, r"makes 'observation.state' the name of .*Give each a name of its own"),
        (
            {"task_index": "observation.task"},
            r"names 'task_index', a column that cannot be renamed",
        ),
        ({STATE: ""}, r"gives 'observation.state' an empty name"),
        ({"action": "a"}, r"no feature is named 'action'.*--dataset.rename OLD=action. It has: ac"),
    ],
)
def test_names_that_do_not_work_are_refused(rename: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_metadata(VIDEO, rename)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_metadata(VIDEO, {"x": "y", "index": "i", STATE: TOP})
    assert len(caught.value.problems) == 3


def test_what_the_policy_asks_for_is_looked_up_under_its_own_names() -> None:
    config = ACTConfig(cameras=(FRONT,), chunk_size=3)
    data = DatasetConfig(root=str(VIDEO), rename={TOP: FRONT, STATE: "observation.joints"})
    dataset = LeRobotDataset.from_config(data, config)
    assert dataset.spec.cameras().keys() == {FRONT}
    assert dataset.spec.observation_vectors() == {"observation.joints": 4}
    batch = dataset.__getitems__([0, 9])
    assert {TOP, STATE, "action_is_pad"} <= batch.keys()  # as the folder has them
    preprocessor = Preprocessor.from_stats(dataset.stats, config.normalization(), data.rename)
    assert {FRONT, "observation.joints"} <= preprocessor(batch).keys()
    with pytest.raises(ConfigError, match=rf"names '{TOP}'.* It has: {FRONT}; --dataset.rename"):
        LeRobotDataset.from_config(data, ACTConfig(cameras=(TOP,)))


def test_two_features_may_swap_their_names(tmp_path: Path) -> None:
    other = "observation.environment"
    names = {STATE: "action", "action": STATE}
    root = copy_named(STATE_ONLY, tmp_path / "swapped", names)
    one, two = LeRobotDataset(STATE_ONLY), LeRobotDataset(root, rename=names)
    assert one.spec.features.keys() == two.spec.features.keys()
    modes = {"observation.": "mean_std", "action": "min_max"}
    batches = [
        Preprocessor.from_stats(dataset.stats, modes, rename)(dataset.__getitems__([0, 40]))
        for dataset, rename in ((one, {}), (two, names))
    ]
    assert all(torch.equal(value, batches[1][name]) for name, value in batches[0].items())
    twice = Preprocessor(rename={STATE: other})
    with pytest.raises(ValueError, match=f"the batch has '{other}' twice"):
        twice({other: torch.zeros(1), STATE: torch.zeros(1)})


@pytest.mark.parametrize("stats", ["file", "data"])
def test_a_run_on_other_names_is_the_run_on_these(tmp_path: Path, stats: str) -> None:
    """Names without `observation.` too: they are normalized all the same."""
    names = {STATE: "robot.joints", "action": "command"}
    root = copy_named(EMBEDDED_ROOT, tmp_path / "data", names)
    back = [f"{new}={old}" for old, new in names.items()]
    words = ["train", *SMALL, "--dataset.episodes", "0", "1", "--dataset.stats", stats]
    words += ["--eval.episodes", "2", "--output_dir"]
    ptrain(*words, tmp_path / "plain")
    ptrain(*words, tmp_path / "renamed", "--dataset.root", root, "--dataset.rename", *back)
    for name in ("model.safetensors", "config.json", "preprocessor.safetensors"):
        plain, renamed = (model_of(tmp_path / run) / name for run in ("plain", "renamed"))
        assert plain.read_bytes() == renamed.read_bytes(), name
    evals = [
        [json.loads(line).get("eval_loss") for line in file.read_text().splitlines()]
        for file in (tmp_path / "plain/metrics.jsonl", tmp_path / "renamed/metrics.jsonl")
    ]
    assert evals[0] == evals[1]
    assert evals[0][-1] is not None
    if stats == "data":
        return

    for run_folder in ("plain", "renamed"):  # the checkpoint's config says how to go on
        said = ptrain("resume", tmp_path / run_folder, "--steps", "4")
        assert "step 4 of 4" in said
    resumed = [
        (model_of(tmp_path / run) / "model.safetensors").read_bytes()
        for run in ("plain", "renamed")
    ]
    assert resumed[0] == resumed[1]
    loaded = load_policy(tmp_path / "renamed")
    assert {"robot.joints", "task_index"} == loaded.example_batch().keys()
    state = torch.from_numpy(np.linspace(-1, 1, 39, dtype=np.float32))[None]
    actions = []
    for name in ("robot.joints", STATE):  # either name will do
        loaded.reset()
        batch = {name: state, "task_index": torch.zeros(1, dtype=torch.long)}
        actions.append(loaded.select_action(batch))
    assert torch.equal(*actions)


@pytest.mark.skipif(importlib.util.find_spec("metaworld") is None, reason="needs the extra sim")
def test_a_renamed_policy_is_evaluated(tmp_path: Path) -> None:
    ptrain(
        *["train", *SMALL, "--dataset.episodes", "0", "--output_dir", tmp_path / "run"],
        *["--dataset.rename", f"{STATE}=observation.proprioception"],
    )
    spec = load_policy(tmp_path / "run").spec
    assert spec.observation_vectors() == {"observation.proprioception": 39}
    said = ptrain("evaluate", tmp_path / "run", "--episodes", "1", "--max_steps", "5")
    assert "reach-v3_failed.gif" in said


def test_trained_sharded_with_a_camera_published_and_loaded(
    tmp_path: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av", reason="needs the extra vision")
    pytest.importorskip("torchvision", reason="needs the extra vision")
    root = copy_named(VIDEO, tmp_path / "data", {TOP: FRONT, STATE: "joints"})
    words = ["train", *SMALL, "--policy.cameras", TOP, "--policy.chunk_size", "4"]
    sharded = ["--nproc_per_node", "2", "--parallelism.dp_shard", "2", "--batch_size", "2"]
    rename = ["--dataset.rename", json.dumps({FRONT: TOP, "joints": STATE})]
    ptrain(*words, "--dataset.root", VIDEO, "--output_dir", tmp_path / "plain", *sharded)
    ptrain(*words, "--dataset.root", root, "--output_dir", tmp_path / "run", *sharded, *rename)
    weights = [model_of(tmp_path / n) / "model.safetensors" for n in ("plain", "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    assert run(["publish", str(tmp_path / "run"), "--repo_id", "user/front"]) == 0
    raw = LeRobotDataset(root, cameras=[FRONT]).__getitems__([0, 30, 74])
    original = LeRobotDataset(VIDEO, cameras=[TOP]).__getitems__([0, 30, 74])
    answers = []
    for path, batch in (
        (tmp_path / "run", raw),
        ("user/front", raw),
        ("user/front", original),
        (tmp_path / "plain", original),
    ):
        answers.append(load_policy(path).select_action(batch))
    assert answers[0].shape == (3, 2)
    assert all(torch.equal(answers[0], other) for other in answers[1:])
    assert FRONT in load_policy("user/front").example_batch()


def test_a_wrong_name_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    said = ptrain(
        *["train", *SMALL, "--output_dir", tmp_path / "run", "--dataset.rename"],
        *["observation.stat=observation.state"],
        code=2,
    )
    assert "dataset.rename names 'observation.stat'" in said
    assert "Did you mean 'observation.state'?" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
