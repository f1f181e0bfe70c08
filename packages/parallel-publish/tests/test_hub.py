"""Conversations with the Hub: checked first, one commit, tried again only where that helps."""

import threading
import time
from dataclasses import replace

import pytest

from parallel_config import ConfigError
from parallel_publish import PublishConfig
from parallel_publish.errors import PublishError
from parallel_publish.fetching import fetch_checkpoint
from parallel_publish.hub import download, list_files, publish_files
from parallel_publish.preflight import preflight
from parallel_publish.retry import RetryPolicy
from parallel_publish.target import Target
from parallel_testing.hub import Fault

COMMIT = r"/api/models/.*/commit/"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    return {name: tmp_path / name for name in ("config.json", "model.safetensors")}


def _send(target, files, **options):
    notes = []
    url = publish_files(target, files, message="Publish", on_note=notes.append, **options)
    return url, notes


def test_preflight_makes_the_repository_and_the_branch(hub, target):
    preflight(replace(target, revision="v2", private=True), card="---\ntags:\n- robot\n---\n# x\n")
    assert hub.repos["user/model"].private
    assert "v2" in hub.repos["user/model"].refs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": "hf_test_reader"}, "may only read"),
        ({"token": "hf_nobody"}, r"HTTP 401 .*Run `hf auth login`"),
        ({"repo_id": "stranger/model"}, "belongs to neither 'user' nor an organization"),
        ({"private": True}, "exists and is public"),
    ],
)
def test_preflight_says_what_to_change(hub, target, change, message):
    hub.create("user/model")
    with pytest.raises(PublishError, match=message):
        preflight(replace(target, **change))
    assert hub.commits("user/model") == []


def test_preflight_refuses_a_missing_token(hub, target, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PublishError, match="token is missing"):
        preflight(replace(target, token=None))


def test_preflight_finds_a_bad_card(hub, target):
    with pytest.raises(PublishError, match="model card is refused by the Hub"):
        preflight(target, card="---\ntags:\n- null\n---\n")
    assert hub.repos == {}  # no empty repository is left behind


def test_offline_mode_is_reported_before_any_request(hub, target, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PublishError, match="HF_HUB_OFFLINE is set"):
        preflight(target)
    assert hub.requests == []


def test_offline_without_a_copy_in_the_cache_is_said_at_once(hub, target, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PublishError) as caught:
        download(target)  # no wait for another attempt, and nothing asked
    assert str(caught.value) == (
        "HF_HUB_OFFLINE is set, and user/model@main is not in the client's cache. Unset it, or "
        "fetch the repository once with a connection."
    )
    assert hub.requests == []


def test_a_hub_that_is_busy_while_a_checkpoint_is_fetched_is_not_a_damaged_one(
    hub, target, tmp_path
):
    hub.create(target.repo_id)
    publish_files(target, {"checkpoints/000001/manifest.json": b"{}"}, message="x")
    # Of the lists and files the client itself tries again, for half a minute.
    hub.faults.append(Fault("/revision/", status=503, times=99))
    with pytest.raises(PublishError, match=r"HTTP 503 \(the server is busy\)"):
        fetch_checkpoint(target, tmp_path / "run")


@pytest.mark.parametrize("endpoint", ["not-a-url", "ftp://host", "http://", "huggingface.co"])
def test_an_endpoint_that_is_not_an_address_is_refused(hub, target, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(PublishError, match=f"HF_ENDPOINT = '{endpoint}' is not an address such as"):
        preflight(target)


def test_an_empty_endpoint_is_the_default_of_the_client(hub, target, monkeypatch):
    from parallel_publish.client import endpoint

    monkeypatch.setenv("HF_ENDPOINT", " ")
    assert endpoint() is None


@pytest.mark.parametrize("token", ["hf test", "hf_é", "hf_\nx"])
def test_a_malformed_token_is_refused_and_not_shown(hub, target, token):
    with pytest.raises(
        PublishError, match="token contains spaces or letters that are not"
    ) as caught:
        preflight(replace(target, token=token))
    assert token not in str(caught.value)
    assert hub.requests == []


def test_one_commit_holds_everything_and_replaces_what_is_stale(hub, target, files):
    repo = hub.create("user/model")
    from parallel_testing.hub import Blob

    old = {"model-00001-of-00002.safetensors": Blob(b"x", True), "notes.txt": Blob(b"mine", False)}
    repo.commit("before", old)
    _send(target, files, replaces=lambda path: path.startswith("model-"))
    assert hub.commits("user/model") == ["before", "Publish"]
    assert set(hub.files("user/model")) == {"config.json", "model.safetensors", "notes.txt"}
    assert hub.files("user/model")["model.safetensors"] == bytes(5000)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(COMMIT, status=500),
        Fault(COMMIT, status=503, times=2),
        Fault(COMMIT, drop=True),
        Fault(COMMIT, status=412),
        Fault(r"^/lfs/[0-9a-f]+$", "PUT", status=503),
    ],
    ids=["500", "503-twice", "dropped", "412", "lfs-503"],
)
def test_a_transient_failure_is_tried_again(hub, target, files, fault):
    hub.create("user/model")
    hub.faults.append(fault)
    _send(target, files)
    assert hub.commits("user/model") == ["Publish"]
    assert fault.times == 0


@pytest.mark.parametrize("how", [{"status": 500}, {"drop": True}], ids=["500", "dropped"])
def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub, target, files, how):
    hub.create("user/model")
    hub.faults.append(Fault(COMMIT, after=True, **how))
    url, notes = _send(target, files)
    assert hub.commits("user/model") == ["Publish"]
    assert hub.repos["user/model"].refs["main"] in url
    assert len(notes) == 1


def test_retry_after_is_obeyed(hub, target, files):
    hub.create("user/model")
    hub.faults.append(Fault(COMMIT, status=429, headers={"Retry-After": "1"}))
    began = time.monotonic()
    _, notes = _send(target, files)
    assert time.monotonic() - began >= 1
    assert "HTTP 429 (too many requests); attempt 2 of 5 in 1.0 s" in notes[0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409])
def test_a_final_answer_is_not_tried_again(hub, target, files, status):
    hub.create("user/model")
    hub.faults.append(Fault(COMMIT, status=status, times=9))
    with pytest.raises(PublishError, match=rf"cannot be written at .*HTTP {status}"):
        _send(target, files)
    assert len(hub.requests_to(COMMIT)) == 1


def test_the_error_after_the_last_attempt_names_the_last_answer(hub, target, files):
    hub.create("user/model")
    hub.faults.append(Fault(COMMIT, status=500, times=99))
    with pytest.raises(PublishError, match=r"HTTP 500 \(the server failed\)"):
        _send(target, files)
    assert len(hub.requests_to(COMMIT)) == 5


def test_a_server_that_does_not_answer_is_given_up_at_the_time_limit(hub, target, files):
    hub.create("user/model")
    hub.faults.append(Fault(COMMIT, delay_s=2.0))
    began = time.monotonic()
    with pytest.raises(PublishError, match="no answer within 1 s"):
        _send(replace(target, retry=RetryPolicy(timeout_s=1.0)), files)
    assert time.monotonic() - began < 2


def test_an_upload_that_was_given_up_is_not_committed_later(hub, target, files):
    hub.create("user/model")
    hub.faults.append(replace(LFS, delay_s=2.0))
    with pytest.raises(PublishError, match="no answer within 1 s"):
        _send(replace(target, retry=RetryPolicy(timeout_s=1.0)), files)
    _wait_for_requests()
    assert hub.commits("user/model") == []


@pytest.mark.parametrize(
    "fault",
    [Fault(COMMIT, status=403), Fault(COMMIT, drop=True, times=99), Fault(COMMIT, delay_s=1.5)],
    ids=["refused", "broken connection", "too late"],
)
def test_a_failure_of_the_network_or_the_hub_is_not_a_config_error(hub, target, files, fault):
    hub.create("user/model")
    hub.faults.append(replace(fault))
    policy = RetryPolicy(attempts=2, base_s=0.01, timeout_s=1.0)
    with pytest.raises(PublishError) as caught:
        _send(replace(target, retry=policy), files)
    assert not isinstance(caught.value, ValueError | ConfigError)
    _wait_for_requests()


def test_a_config_without_a_repository_is_a_config_error():
    with pytest.raises(ConfigError, match=r"publish\.repo_id is missing\."):
        Target.of(PublishConfig())


LFS = Fault(r"^/lfs/[0-9a-f]+$", "PUT")


def _stopped_at(hub, target, files, fault, pattern):
    """Ask to leave once a request is under way; what came of it, and how long that took."""
    hub.create("user/model")
    answer = threading.Event()
    hub.faults.append(replace(fault, until=answer) if fault.status == 500 else fault)
    since = []

    def stop():
        if not since and hub.requests_to(pattern):
            since.append(time.monotonic())
        return bool(since)

    try:
        with pytest.raises(PublishError) as caught:
            _send(target, files, stop=stop)
        seconds = time.monotonic() - since[0]
    finally:
        answer.set()
        _wait_for_requests()
    return str(caught.value), seconds, hub.commits("user/model")


def _wait_for_requests():
    """Those that were left to themselves; the answer that they get late must change nothing."""
    for thread in threading.enumerate():
        if thread.name == "hub-request":
            thread.join(30)


def test_a_stop_does_not_wait_for_a_file_that_is_being_sent(hub, target, files):
    said, seconds, commits = _stopped_at(hub, target, files, LFS, r"^/lfs/[0-9a-f]+$")
    assert said == "user/model@main is not written: stopped on request."
    assert seconds < 2
    assert commits == []


def test_a_stop_does_not_wait_for_the_next_attempt(hub, target, files):
    target = replace(target, retry=RetryPolicy(base_s=60))
    fault = Fault(COMMIT, status=503, times=9)
    said, seconds, commits = _stopped_at(hub, target, files, fault, COMMIT)
    assert said == "user/model@main is not written: stopped on request."
    assert seconds < 2
    assert commits == []


def test_a_stop_waits_for_the_answer_to_a_commit(hub, target, files):
    hub.create("user/model")
    hub.faults.append(Fault(COMMIT, delay_s=1.0))
    url, _ = _send(target, files, stop=lambda: bool(hub.requests_to("/commit/")))
    assert hub.repos["user/model"].refs["main"] in url


def test_a_stop_waits_for_a_commit_only_as_long_as_the_limit(hub, target, files, monkeypatch):
    monkeypatch.setattr("parallel_publish.hub.COMMIT_WAIT_S", 0.3)
    said, seconds, _ = _stopped_at(hub, target, files, Fault(COMMIT), COMMIT)
    assert "may be written: stopped on request, while the commit waited for its answer" in said
    assert 0.2 < seconds < 3


def test_a_stop_from_the_start_sends_no_request(hub, target, files):
    hub.create("user/model")
    with pytest.raises(PublishError, match="is not written: stopped on request"):
        _send(target, files, stop=lambda: True)
    with pytest.raises(PublishError, match="is not prepared: stopped on request"):
        preflight(target, stop=lambda: True)
    assert hub.requests == []


def test_a_refused_connection_is_a_publish_error_that_names_it(hub, monkeypatch, files):
    from parallel_testing.ranks import free_port

    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    target = Target(
        repo_id="user/model", token=hub.token, retry=RetryPolicy(attempts=2, base_s=0.01)
    )
    with pytest.raises(PublishError, match="ConnectError"):
        _send(target, files)


def test_a_download_returns_the_files_that_were_sent(hub, target, files, tmp_path):
    hub.create("user/model", private=True)
    _send(target, files)
    assert {(file.path, file.size_bytes) for file in list_files(target)} == {
        ("config.json", 2),
        ("model.safetensors", 5000),
    }
    folder = download(target, allow=["*.safetensors"])
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    with pytest.raises(PublishError, match="HTTP 404"):
        download(replace(target, token="hf_test_stranger"), into=tmp_path / "other")


def test_a_token_is_never_shown(hub, target):
    assert hub.token not in repr(target)
