"""The local Hub answers the real client as the real Hub does."""

import hashlib
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from parallel_testing.hub import Fault, card_errors
from parallel_testing.hub_state import MAX_REGULAR_BYTES, git_oid

CARD = b"# A model\n"
WEIGHTS = bytes(range(256)) * 40
REPO = "user/model"


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=hub.token)


@pytest.fixture
def filled(hub, api):
    """A repository with a regular file and an LFS object."""
    hub.create(REPO)
    api.create_commit(
        REPO,
        [CommitOperationAdd("README.md", CARD), CommitOperationAdd("model.safetensors", WEIGHTS)],
        commit_message="Add a model",
    )
    return api


def _status(caught):
    return caught.value.response.status_code


def _metadata(hub, path, token=None, revision="main"):
    url = hf_hub_url(REPO, path, revision=revision, endpoint=hub.endpoint)
    return get_hf_file_metadata(url, token=token or hub.token)


def test_a_new_repository_is_empty_and_belongs_to_its_user(hub, api):
    url = api.create_repo("model")
    assert url.repo_id == REPO
    assert hub.files(REPO) == {}
    assert api.whoami()["name"] == "user"
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_repo(REPO)
    assert _status(caught) == 409
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_repo("stranger/model")
    assert _status(caught) == 403


def test_a_dataset_is_another_repository_than_the_model_of_its_name(hub, api, tmp_path):
    assert api.create_repo(REPO, repo_type="dataset").repo_type == "dataset"
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info(REPO)
    hub.create(REPO)
    data = [CommitOperationAdd("data/one.parquet", WEIGHTS), CommitOperationAdd("README.md", CARD)]
    made = api.create_commit(REPO, data, commit_message="Add data", repo_type="dataset")
    assert api.repo_info(REPO, repo_type="dataset").sha == made.oid
    assert sorted(hub.files(f"datasets/{REPO}")) == ["README.md", "data/one.parquet"]
    assert hub.files(REPO) == {}
    listed = api.list_repo_tree(REPO, recursive=True, repo_type="dataset")
    assert {entry.path for entry in listed if hasattr(entry, "size")} >= {"data/one.parquet"}
    found = hf_hub_download(
        REPO, "data/one.parquet", repo_type="dataset", endpoint=hub.endpoint, token=hub.token,
        cache_dir=tmp_path,
    )  # fmt: skip
    assert Path(found).read_bytes() == WEIGHTS


def test_a_commit_holds_regular_files_and_lfs_objects(hub, filled):
    assert hub.files(REPO) == {"README.md": CARD, "model.safetensors": WEIGHTS}
    assert hub.commits(REPO) == ["Add a model"]
    assert list(hub.objects) == [hashlib.sha256(WEIGHTS).hexdigest()]


def test_a_commit_changes_and_deletes_files_and_keeps_the_others(hub, filled):
    operations = [CommitOperationAdd("a.json", b"{}"), CommitOperationDelete("README.md")]
    made = filled.create_commit(REPO, operations, commit_message="Second")
    assert hub.files(REPO) == {"a.json": b"{}", "model.safetensors": WEIGHTS}
    assert made.oid == hub.repos[REPO].refs["main"]


def test_a_commit_on_an_older_parent_is_refused(hub, filled):
    parent = filled.repo_info(REPO).sha
    second, third = ([CommitOperationAdd("a.json", content)] for content in (b"{}", b"[]"))
    filled.create_commit(REPO, second, commit_message="Second")
    with pytest.raises(HfHubHTTPError) as caught:
        filled.create_commit(REPO, third, commit_message="Third", parent_commit=parent)
    assert _status(caught) == 412
    assert hub.commits(REPO) == ["Add a model", "Second"]


def test_an_object_that_is_there_is_not_sent_again(hub, filled):
    sent = len(hub.requests_to("^/lfs/", "PUT"))
    filled.create_commit(
        REPO, [CommitOperationAdd("copy.safetensors", WEIGHTS)], commit_message="Copy"
    )
    assert hub.files(REPO)["copy.safetensors"] == WEIGHTS
    assert len(hub.requests_to("^/lfs/", "PUT")) == sent == 1


def test_a_large_file_of_any_name_is_an_lfs_object(hub, api):
    hub.create(REPO)
    small, large = bytes(MAX_REGULAR_BYTES), bytes(MAX_REGULAR_BYTES + 1)
    files = [CommitOperationAdd("small.txt", small), CommitOperationAdd("large.txt", large)]
    api.create_commit(REPO, files, commit_message="Sizes")
    blobs = hub.repos[REPO].at("main").files
    assert (blobs["small.txt"].is_lfs, blobs["large.txt"].is_lfs) == (False, True)


def test_the_tree_lists_sizes_and_names_of_contents(filled):
    found = {entry.path: entry for entry in filled.list_repo_tree(REPO, recursive=True)}
    assert {path: entry.size for path, entry in found.items()} == {
        "README.md": len(CARD),
        "model.safetensors": len(WEIGHTS),
    }
    assert found["README.md"].blob_id == git_oid(CARD)
    assert found["README.md"].lfs is None
    assert found["model.safetensors"].lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()


def test_a_branch_moves_alone_and_a_tag_stays(hub, filled):
    filled.create_branch(REPO, branch="next")
    filled.create_tag(REPO, tag="v1", revision="main")
    filled.create_commit(
        REPO, [CommitOperationAdd("a", b"a")], commit_message="On next", revision="next"
    )
    assert (
        {"README.md", "model.safetensors"} == hub.files(REPO, "v1").keys() == hub.files(REPO).keys()
    )
    assert "a" in hub.files(REPO, "next")
    assert {branch.name for branch in filled.list_repo_refs(REPO).branches} >= {"main", "next"}
    with pytest.raises(HfHubHTTPError) as caught:
        filled.create_branch(REPO, branch="next")
    assert _status(caught) == 409
    with pytest.raises(HfHubHTTPError) as caught:
        filled.create_tag(REPO, tag="v1")
    assert _status(caught) == 409


def test_a_file_has_its_commit_and_etag_in_the_headers(hub, filled):
    regular, lfs = _metadata(hub, "README.md"), _metadata(hub, "model.safetensors")
    head = hub.repos[REPO].refs["main"]
    assert (regular.commit_hash, lfs.commit_hash) == (head, head)
    assert regular.etag == git_oid(CARD)
    assert lfs.etag == hashlib.sha256(WEIGHTS).hexdigest()
    assert (regular.size, lfs.size) == (len(CARD), len(WEIGHTS))


def test_a_download_brings_the_bytes_of_any_revision(hub, filled, tmp_path):
    old = filled.repo_info(REPO).sha
    filled.create_commit(REPO, [CommitOperationAdd("README.md", b"new")], commit_message="New")
    for revision, expected in (("main", b"new"), (old, CARD)):
        path = filled.hf_hub_download(REPO, "README.md", revision=revision)
        assert Path(path).read_bytes() == expected
    path = filled.hf_hub_download(REPO, "model.safetensors", local_dir=tmp_path)
    assert Path(path).read_bytes() == WEIGHTS


def test_a_private_repository_is_missing_for_others(hub, api):
    api.create_repo(REPO, private=True)
    assert api.repo_info(REPO).private
    for token in ("hf_test_stranger", False):
        with pytest.raises(RepositoryNotFoundError):
            HfApi(endpoint=hub.endpoint, token=token).repo_info(REPO)
    assert HfApi(endpoint=hub.endpoint, token="hf_test_reader").repo_info(REPO).private


def test_a_public_repository_is_read_without_a_token(hub, filled):
    assert HfApi(endpoint=hub.endpoint, token=False).repo_info(REPO).sha


def test_only_a_token_that_may_write_writes(hub, filled):
    for token in ("hf_test_reader", "hf_test_stranger"):
        with pytest.raises(HfHubHTTPError) as caught:
            HfApi(endpoint=hub.endpoint, token=token).create_commit(
                REPO, [CommitOperationAdd("a", b"a")], commit_message="x"
            )
        assert _status(caught) == 403
    assert hub.commits(REPO) == ["Add a model"]


def test_an_unknown_token_is_refused_with_401(hub, filled):
    with pytest.raises(HfHubHTTPError) as caught:
        HfApi(endpoint=hub.endpoint, token="hf_unknown").whoami()
    assert _status(caught) == 401


def test_what_is_missing_is_a_404_that_says_what(hub, filled):
    with pytest.raises(RepositoryNotFoundError) as caught:
        filled.repo_info("user/other")
    assert _status(caught) == 404
    with pytest.raises(RevisionNotFoundError):
        filled.repo_info(REPO, revision="other")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "other.json", endpoint=hub.endpoint, token=hub.token)


def test_an_address_that_the_hub_does_not_know_fails_loudly(filled):
    with pytest.raises(HfHubHTTPError, match="no such address"):
        filled.list_repo_commits(REPO)


def test_a_wrong_card_is_refused(hub, filled):
    with pytest.raises(ValueError, match="must be a string"):
        filled.create_commit(
            REPO,
            [CommitOperationAdd("README.md", b"---\ntags:\n- null\n---\n")],
            commit_message="Card",
        )
    assert hub.files(REPO)["README.md"] == CARD
    assert list(card_errors("---\nlicense: mit\ntags:\n- robotics\n---\n")) == []


def test_a_fault_hits_as_often_as_it_says_and_only_where_it_matches(hub, filled):
    hub.faults.append(Fault("/revision/|/api/models/user/model$", "GET", status=403, times=2))
    for _ in range(2):
        with pytest.raises(HfHubHTTPError) as caught:
            filled.repo_info(REPO)
        assert _status(caught) == 403
    assert filled.repo_info(REPO).sha
    hub.faults.append(Fault("/api/models/", "POST", status=403))
    assert filled.repo_info(REPO).sha


def test_a_fault_can_ask_the_client_to_wait(hub, filled):
    hub.faults.append(Fault("/api/models/", status=403, headers={"Retry-After": "7"}))
    with pytest.raises(HfHubHTTPError) as caught:
        filled.repo_info(REPO)
    assert caught.value.response.headers["Retry-After"] == "7"


@pytest.mark.parametrize(("after", "commits"), [(False, []), (True, ["Lost"])])
def test_a_dropped_connection_loses_the_request_or_only_the_answer(hub, api, after, commits):
    hub.create(REPO)
    hub.faults.append(Fault("/commit/", drop=True, after=after, times=9))
    with pytest.raises(Exception, match=r"(?i)disconnect|reset|closed"):
        api.create_commit(REPO, [CommitOperationAdd("a", b"a")], commit_message="Lost")
    assert hub.commits(REPO)[:1] == commits


def test_a_late_answer_comes_late_and_well(hub, filled):
    hub.faults.append(Fault("/api/models/", delay_s=0.5))
    began = time.monotonic()
    assert filled.repo_info(REPO).sha
    assert time.monotonic() - began >= 0.5


def test_an_answer_can_wait_for_the_test(hub, filled):
    go, answers = threading.Event(), []
    hub.faults.append(Fault("/api/models/", until=go))
    before = len(hub.requests)
    thread = threading.Thread(target=lambda: answers.append(filled.repo_info(REPO).sha))
    thread.start()
    while len(hub.requests) == before:
        time.sleep(0.01)
    assert answers == []
    go.set()
    thread.join(30)
    assert answers == [hub.repos[REPO].refs["main"]]


def test_requests_are_kept_in_order_with_method_and_path(hub, filled):
    assert [request.method for request in hub.requests_to("/commit/")] == ["POST"]
    assert hub.requests_to("/commit/", "GET") == []
