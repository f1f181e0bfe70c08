"""The Hub, and the only module that knows its client: checks, one commit, lists and downloads."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from parallel_config import ConfigError, Problem
from parallel_publish.config import PublishConfig
from parallel_publish.errors import PublishError
from parallel_publish.retry import RetryPolicy, Stop, Stopped, never, retried, status_of

T = TypeVar("T")
ENDPOINT = "HF_ENDPOINT"
PREFLIGHT_TIMEOUT_S = 120.0
COMMIT_WAIT_S = 10.0
"""How long somebody who asked to leave waits for the answer to a commit that was sent."""


def note(line: str) -> None:
    """Say something to whoever watches the run, without touching what a command prints."""
    print(line, file=sys.stderr, flush=True)


def without_bars() -> None:
    """Switch the client's progress bars off, unless the user has said what they want."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()


@dataclass(frozen=True, kw_only=True)
class Target:
    """A repository, the branch that is meant, and how to get in."""

    repo_id: str
    revision: str = "main"
    private: bool | None = None
    """Of a new repository; None is the account's default."""
    token: str | None = field(default=None, repr=False)
    """None: the one that the client finds (HF_TOKEN, or a login)."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    @classmethod
    def of(cls, config: PublishConfig, *, token: str | None = None) -> Target:
        """The target of a config.

        Raises:
            ConfigError: it does not name a repository.
        """
        if config.repo_id is None:
            raise ConfigError.of("publish.repo_id", "is missing.", "Name one, as user/name.")
        return cls(
            repo_id=config.repo_id,
            revision=config.revision or "main",
            private=config.private or None,
            token=token,
            retry=RetryPolicy(timeout_s=config.timeout_s),
        )

    @classmethod
    def of_checkpoints(cls, config: PublishConfig, *, token: str | None = None) -> Target:
        """Where the run's whole checkpoints go.

        Raises:
            ConfigError: the config does not name a repository.
        """
        return replace(cls.of(config, token=token), revision=config.checkpoints_revision)


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a repository."""

    path: str
    size_bytes: int


def preflight(target: Target, *, card: str | None = None, stop: Stop = never) -> None:
    """Check name, token, right to write, visibility and card before anything is sent or trained.

    Makes the repository if it does not exist, because that is the only proof of the right to. It
    waits for a slow server, but not as long as an upload may take.

    Raises:
        PublishError: says what to change.
    """
    _refuse_setup(target)
    patience_s = min(target.retry.timeout_s, PREFLIGHT_TIMEOUT_S)
    target = replace(target, retry=replace(target.retry, timeout_s=patience_s))

    def check() -> None:
        api = _api(target)
        _check_token(api, target)
        existing = _visibility(api, target)
        if existing is False and target.private:
            raise PublishError.of(
                "publish.private",
                f"= True, but {target.repo_id} exists and is public.",
                "Choose another repository, or make that one private on the Hub first.",
            )
        if existing is None:
            api.create_repo(target.repo_id, private=target.private, exist_ok=True)
        else:
            _check_write_right(api, target)
        _make_branch(api, target)
        if card is not None:
            check_card(target, card)

    _ask(target, check, "prepared", stop=stop)


def check_disk(folder: Path, needed_bytes: int, what: str = "the files to publish") -> None:
    """Raise PublishError unless the disk of `folder` has room for what will be written there."""
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise PublishError.of(
            folder,
            f"has {free:,} bytes free, but {what} need {needed_bytes:,}.",
            "Free some space, or use another folder.",
        )


def check_card(target: Target, card: str) -> None:
    """Have the Hub check a model card's metadata; PublishError names what it refuses."""
    try:
        _api(target)._validate_yaml(card, repo_type="model")
    except ValueError as error:
        raise PublishError.of("model card", f"is refused by the Hub: {error}") from error


def publish_files(
    target: Target,
    files: Mapping[str, Path | bytes],
    *,
    message: str,
    replaces: Callable[[str], bool] = lambda path: False,
    on_note: Callable[[str], None] = note,
    stop: Stop = never,
) -> str:
    """Send files or bytes, by path in the repository, in one commit; returns its address.

    Files there for which `replaces` is true and that are not sent are removed by the same commit.
    Tried again as the target's policy says; a commit whose answer was lost is not made twice. Once
    `stop` is true it ends: at once while files are sent, which by themselves change nothing, and
    otherwise with the answer to the commit.

    Raises:
        PublishError: it cannot be done, or not now; nothing changed on the Hub.
    """
    _refuse_setup(target)
    committing, left = threading.Event(), threading.Event()

    def commit() -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        api = _api(target)
        head = api.repo_info(target.repo_id, revision=target.revision)
        there = [sibling.rfilename for sibling in head.siblings or ()]
        stale = [path for path in there if replaces(path) and path not in files]
        added = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in sorted(files.items())
        ]
        api.preupload_lfs_files(target.repo_id, added, revision=target.revision)
        committing.set()
        try:
            if left.is_set() or stop():  # nobody waits for it any more, and was told so
                raise Stopped
            made = api.create_commit(
                target.repo_id,
                [*added, *(CommitOperationDelete(path) for path in stale)],
                commit_message=message,
                revision=target.revision,
                parent_commit=head.sha,
            )
        finally:
            committing.clear()
        return str(made.commit_url)

    try:
        return _ask(target, commit, "written", on_note, _but_for(committing, stop))
    except PublishError:
        left.set()
        if not (stop() and committing.is_set()):
            raise
        raise PublishError.of(
            f"{target.repo_id}@{target.revision}",
            "may be written: stopped on request, while the commit waited for its answer.",
        ) from None


def list_files(target: Target) -> list[RemoteFile]:
    """Every file of the revision.

    Raises:
        PublishError: there is no such repository or revision, or no way in.
    """
    _refuse_setup(target)

    def ask() -> list[RemoteFile]:
        entries = _api(target).list_repo_tree(
            target.repo_id, recursive=True, revision=target.revision
        )
        return [
            RemoteFile(path=entry.path, size_bytes=entry.size)
            for entry in entries
            if hasattr(entry, "size")
        ]

    return _ask(target, ask, "read")


def at_one_state(target: Target) -> Target:
    """The target at the commit that its revision is now, so that several requests see one state.

    Raises:
        PublishError: there is no such repository or revision, or no way in.
    """
    _refuse_setup(target)
    sha = _ask(
        target,
        lambda: str(_api(target).repo_info(target.repo_id, revision=target.revision).sha),
        "read",
    )
    return replace(target, revision=sha)


def download(
    target: Target,
    *,
    allow: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    into: Path | None = None,
) -> Path:
    """Fetch the files of the revision that match; returns the folder.

    Without `into` they go to the client's cache, which also serves when the Hub is out of reach.

    Raises:
        PublishError: it cannot be had.
    """
    from huggingface_hub import snapshot_download

    if into is not None:
        _refuse_setup(target)  # else the client's cache may have it

    def ask() -> Path:
        found = snapshot_download(
            target.repo_id,
            revision=target.revision,
            token=target.token,
            endpoint=_endpoint(),
            local_dir=into,
            allow_patterns=list(allow) if allow is not None else None,
            ignore_patterns=list(ignore) if ignore is not None else None,
        )
        return Path(str(found))

    return _ask(target, ask, "read")


def _api(target: Target) -> Any:
    """The client. The endpoint is read now: the client itself reads it once, when imported."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=_endpoint(), token=target.token, library_name="parallel-publish")


def _refuse_setup(target: Target) -> None:
    """Refuse what this machine's variables make impossible, before anybody is asked."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise PublishError.of(
            "HF_HUB_OFFLINE",
            f"is set, so {target.repo_id} cannot be reached.",
            "Unset it.",
        )
    endpoint = _endpoint()
    if endpoint is not None and not re.match(r"https?://[^/\s]", endpoint):
        raise PublishError.of(
            ENDPOINT, f"= {endpoint!r} is no address such as https://host.", "Mend or unset it."
        )
    token = target.token or get_token() or ""
    if not re.fullmatch(r"[\x21-\x7e]*", token):
        raise PublishError.of(
            "token", "holds spaces or letters that no token has.", "Copy it again (HF_TOKEN)."
        )


def _endpoint() -> str | None:
    """Where the Hub is; None is the client's own address. A variable left empty says nothing."""
    return os.environ.get(ENDPOINT, "").strip() or None


def _check_token(api: Any, target: Target) -> None:
    from huggingface_hub import get_token

    if (target.token or get_token()) is None:
        raise PublishError.of(
            "token", "is missing: the Hub wants to know who writes.", _TOKEN_REMEDY
        )
    who = api.whoami()
    role = (who.get("auth") or {}).get("accessToken", {}).get("role")
    if role == "read":
        raise PublishError.of(
            "token",
            f"of {who.get('name')!r} may only read, but {target.repo_id} is to be written.",
            _TOKEN_REMEDY,
        )
    names = {who.get("name"), *(org.get("name") for org in who.get("orgs") or ())}
    if role == "write" and target.repo_id.split("/")[0] not in names:
        raise PublishError.of(
            "publish.repo_id",
            f"= {target.repo_id!r} belongs to neither {who.get('name')!r} nor an organization "
            "of theirs.",
            f"Use {who.get('name')}/{target.repo_id.split('/')[-1]}.",
        )


def _check_write_right(api: Any, target: Target) -> None:
    """Ask how a file would be sent, which only those who may write are told; nothing is sent."""
    from huggingface_hub import CommitOperationAdd

    api.preupload_lfs_files(target.repo_id, [CommitOperationAdd("README.md", b"-")])


_TOKEN_REMEDY = "Run `hf auth login`, or set HF_TOKEN to a token with write permission."


def _visibility(api: Any, target: Target) -> bool | None:
    """Whether the repository is private; None when there is none."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return bool(api.repo_info(target.repo_id).private)
    except RepositoryNotFoundError:
        return None


def _make_branch(api: Any, target: Target) -> None:
    if target.revision == "main" or re.fullmatch(r"[0-9a-f]{40}", target.revision):
        return
    api.create_branch(target.repo_id, branch=target.revision, exist_ok=True)


def _but_for(committing: threading.Event, stop: Stop) -> Stop:
    """`stop`, but not while a commit waits for its answer, unless that takes long."""
    since: list[float] = []

    def should_leave() -> bool:
        if not stop():
            return False
        if not since:
            since.append(time.monotonic())
        return not committing.is_set() or time.monotonic() - since[0] > COMMIT_WAIT_S

    return should_leave


def _ask(
    target: Target,
    act: Callable[[], T],
    what: str,
    on_note: Callable[[str], None] = note,
    stop: Stop = never,
) -> T:
    """Run a conversation with the Hub; whatever goes wrong becomes one line."""
    try:
        return retried(act, target.retry, on_note=on_note, describe=_in_short, stop=stop)
    except PublishError:
        raise
    except Stopped:
        raise PublishError.of(
            f"{target.repo_id}@{target.revision}", f"is not {what}: stopped on request."
        ) from None
    except Exception as error:
        raise PublishError(_problem(target, what, error)) from error


def _problem(target: Target, what: str, error: Exception) -> Problem:
    status = status_of(error)
    remedies = {
        401: _TOKEN_REMEDY,
        403: "Use a token that may, or another repository.",
        404: "Check the names of repository and branch, and that the token may see them.",
        409: "Somebody else works on it; try again.",
        412: "Somebody else commits to it; try again.",
        413: "Split the weights into smaller files (max_shard_size).",
        429: "Wait some minutes and try again.",
    }
    remedy = remedies.get(status or 0, "Try again later.")
    where = _endpoint() or "the Hub"
    return Problem(
        f"{target.repo_id}@{target.revision}",
        f"cannot be {what} at {where}: {_in_short(error)}.",
        remedy,
    )


def _in_short(error: BaseException) -> str:
    """One line, without addresses of requests and without anything a token could be in."""
    status = status_of(error)
    if status is not None:
        return f"HTTP {status} ({_MEANING.get(status, 'refused')})"
    if isinstance(error, TimeoutError):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no details'}".rstrip(".")


_MEANING = {
    400: "the request is wrong",
    401: "token missing, wrong or expired",
    402: "payment required",
    403: "the token may not do this",
    404: "not found, or hidden from this token",
    409: "conflict",
    412: "the branch moved meanwhile",
    413: "too large",
    429: "too many requests",
    500: "the server failed",
    502: "the server is unreachable",
    503: "the server is busy",
    504: "the server took too long",
}
