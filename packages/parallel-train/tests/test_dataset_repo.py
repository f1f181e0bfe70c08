"""A dataset of the Hub: `meta` first, then the files that the run reads, at one commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from parallel_config import ConfigError
from parallel_publish import PublishError
from parallel_testing.hub import HubServer
from parallel_testing.hub_fixture import CLIENT_WARNING, local_hub  # noqa: F401
from parallel_testing.hub_state import Blob, Fault
from parallel_testing.programs import run_ptrain
from parallel_train.data.config import DatasetConfig, lerobot_folder
from parallel_train.data.fetch import located
from parallel_train.data.writing import Episode, write_dataset

pytest.importorskip("av")
pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)

TOP, SIDE = "observation.images.top", "observation.images.side"
REPO = "datasets/user/demo"
TINY = [
    "--policy.dim_model", "32", "--policy.dim_feedforward", "16", "--policy.n_vae_layers", "1",
    "--policy.chunk_size", "4", "--policy.vision_weights", "None", "--batch_size", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes with two cameras; the last episode lies in a data file of its own."""
    generator = np.random.default_rng(0)

    def episode() -> Episode:
        state = generator.normal(size=(8, 3)).astype(np.float32)
        picture = np.full((8, 32, 32, 3), 90, np.uint8)
        return Episode(state, state[:, :2], "look", {TOP: picture, SIDE: picture + 9})

    root = tmp_path_factory.mktemp("data") / "set"
    write_dataset(root, [episode() for _ in range(3)], fps=10)
    return root


def upload(hub: HubServer, folder: Path, message: str = "first") -> str:
    """Its commit."""
    repo = hub.repos.get(REPO) or hub.create(REPO)
    files = {
        path.relative_to(folder).as_posix(): Blob(path.read_bytes(), True)
        for path in folder.rglob("*")
        if path.is_file()
    }
    return repo.commit(message, files).sha


def train(tmp_path: Path, *words: object, code: int = 0, **env: str) -> str:
    return run_ptrain("train", *TINY, *words, cwd=tmp_path, code=code, env=env)


def fetched(hub: HubServer) -> set[str]:
    """Files that were sent so far."""
    sent = hub.requests_to(r"/resolve/", "GET")
    return {request.path.partition("/resolve/")[2].partition("/")[2] for request in sent}


def saved(run: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((run / "train_config.json").read_text())["dataset"]
    return config


def test_only_what_the_run_reads_is_fetched_and_a_resume_reads_the_same_commit(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    commit = upload(hub, folder)
    flags = ["--dataset.repo_id", "user/demo", "--policy.cameras", TOP, "--steps", 2]
    said = train(tmp_path, *flags, "--output_dir", "run")
    assert "fetching 2 files" in said
    assert f"user/demo@{commit}" in said
    got = fetched(hub)
    assert {name for name in got if not name.startswith("meta/")} == {
        "data/chunk-000/file-000.parquet",
        f"videos/{TOP}/chunk-000/file-000.mp4",
    }
    assert saved(tmp_path / "run")["repo_id"] == "user/demo"
    assert saved(tmp_path / "run")["revision"] == commit
    upload(hub, folder.parent / "nothing", "all files are gone")
    before = len(hub.requests)
    said = run_ptrain("resume", "run", "--steps", 4, cwd=tmp_path)
    assert "finished: step 4 of 4" in said
    assert not hub.requests[before:]  # a commit that is here is not asked for


def test_two_ranks_train_on_it_and_without_a_connection_the_last_state_serves(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    commit = upload(hub, folder)
    flags = ["--dataset.repo_id", "user/demo@main", "--steps", 1]
    train(tmp_path, *flags, "--nproc_per_node", 2, "--output_dir", "two")
    assert saved(tmp_path / "two")["revision"] == commit
    said = train(tmp_path, *flags, "--output_dir", "again", HF_HUB_OFFLINE="1")
    assert f"taking user/demo as it was fetched before, at {commit}" in said


def test_meta_that_was_fetched_in_part_is_completed(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    commit = upload(hub, folder)
    named = DatasetConfig(repo_id="user/demo", revision=commit)
    hub.faults.append(Fault(r"meta/tasks\.parquet", status=403, times=1000))
    with pytest.raises(PublishError, match="HTTP 403"):
        located(named)
    assert (named.folder / "meta/info.json").is_file()
    hub.faults.clear()
    assert located(named) == named
    assert (named.folder / "meta/tasks.parquet").is_file()
    before = len(hub.requests)
    assert located(named) == named
    assert len(hub.requests) == before


def test_a_folder_of_lerobot_is_taken_as_it_is(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    home = lerobot_folder("user/demo")
    home.parent.mkdir(parents=True)
    home.symlink_to(folder)
    train(tmp_path, "--dataset.repo_id", "user/demo", "--steps", 1, "--output_dir", "run")
    assert not hub.requests
    assert saved(tmp_path / "run")["revision"] is None


def test_a_tag_is_fetched_although_lerobot_has_a_folder(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    commit = upload(hub, folder)
    hub.repos[REPO].refs["v3.0"] = commit
    upload(hub, folder.parent / "nothing", "all files are gone")
    home = lerobot_folder("user/demo")
    home.parent.mkdir(parents=True)
    home.symlink_to(folder)
    train(tmp_path, "--dataset.repo_id", "user/demo@v3.0", "--steps", 1, "--output_dir", "run")
    assert saved(tmp_path / "run")["revision"] == commit


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["user/missing"], "user/missing@main cannot be read at http"),
        (["user/demo@nowhere"], "user/demo@nowhere cannot be read at http"),
        (["user/demo"], "= 'user/demo' does not hold meta/info.json at main: it is not a LeRobot"),
        (["demo"], "dataset.repo_id = 'demo', but it must be a dataset on the Hub, as user/name"),
        (["user/demo@a..b"], "dataset.revision = 'a..b' is not a branch, tag or commit."),
        (["user/demo", "--dataset.root", "x"], "and dataset.root = 'x' name two datasets. Use one"),
        (
            ["user/demo@v1", "--dataset.revision", "v2"],
            "dataset.repo_id = 'user/demo@v1', but it must be a dataset on the Hub, as user/name, ",
        ),
    ],
)
def test_what_cannot_be_had_is_one_clear_line(
    hub: HubServer, tmp_path: Path, words: Sequence[str], expected: str
) -> None:
    hub.create(REPO)
    said = train(tmp_path, "--dataset.repo_id", *words, code=2)
    assert expected in said
    assert "Traceback" not in said
    assert list(tmp_path.glob("outputs/*")) == []


def test_ranks_leave_together_when_the_hub_refuses(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    upload(hub, folder)
    hub.faults.append(Fault(r"\.parquet", status=403, times=1000))
    said = train(tmp_path, "--dataset.repo_id", "user/demo", "--nproc_per_node", 2, code=2)
    assert "cannot be read at http" in said
    assert "HTTP 403" in said
    assert "Traceback" not in said


def test_a_plan_reads_only_meta_and_says_what_it_cannot_have(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    upload(hub, folder)
    run_ptrain("plan", "--dataset.repo_id", "user/demo", "--world_size", 2, cwd=tmp_path)
    assert all(name.startswith("meta/") for name in fetched(hub))
    said = run_ptrain("plan", "--dataset.repo_id", "user/none", cwd=tmp_path, code=2)
    assert "user/none@main cannot be read at http" in said
    assert "Traceback" not in said


def test_a_fault_of_the_dataset_names_the_repository(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    upload(hub, folder)
    files = hub.repos[REPO].at("main")
    assert files is not None
    del files.files["meta/tasks.parquet"]
    said = train(tmp_path, "--dataset.repo_id", "user/demo", code=2)
    assert "dataset.repo_id = 'user/demo' (in " in said
    assert "meta/tasks.parquet is missing." in said


def test_a_revision_without_a_repository_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset\.revision = 'main', but a folder does not"):
        DatasetConfig(revision="main")
    assert DatasetConfig(repo_id="user/name@v2").revision == "v2"
