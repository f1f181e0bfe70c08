"""What is sent to the Hub and fetched from it: one commit, lists of files, downloads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parallel_publish.client import ask, client, endpoint, note, refuse_setup
from parallel_publish.errors import PublishError
from parallel_publish.retry import Stop, Stopped, never
from parallel_publish.target import Target

COMMIT_WAIT_S = 10.0
"""How long a caller that asked to leave waits for the answer to a commit that was sent."""


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a repository."""

    path: str
    size_bytes: int


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
    refuse_setup(target)
    committing, left = threading.Event(), threading.Event()

    def commit() -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        api = client(target)
        head = api.model_info(target.repo_id, revision=target.revision)
        there = [sibling.rfilename for sibling in head.siblings or ()]
        stale = [path for path in there if replaces(path) and path not in files]
        added = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in sorted(files.items())
        ]
        api.preupload_lfs_files(target.repo_id, added, revision=target.revision)
        committing.set()
        try:
            if left.is_set() or stop():  # the caller has left, with an error that says so
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
        return ask(target, commit, "written", on_note, _but_for(committing, stop))
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
        PublishError: the repository or revision is missing, or the token may not read it.
    """
    refuse_setup(target)

    def act() -> list[RemoteFile]:
        entries = client(target).list_repo_tree(
            target.repo_id, recursive=True, revision=target.revision
        )
        return [
            RemoteFile(path=entry.path, size_bytes=entry.size)
            for entry in entries
            if hasattr(entry, "size")
        ]

    return ask(target, act, "read")


def at_one_state(target: Target) -> Target:
    """The target at the commit that its revision is now, so that several requests see one state.

    Raises:
        PublishError: the repository or revision is missing, or the token may not read it.
    """
    refuse_setup(target)
    sha = ask(
        target,
        lambda: str(client(target).repo_info(target.repo_id, revision=target.revision).sha),
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
        refuse_setup(target)  # else the client's cache may have it

    def act() -> Path:
        found = snapshot_download(
            target.repo_id,
            revision=target.revision,
            token=target.token,
            endpoint=endpoint(),
            local_dir=into,
            allow_patterns=list(allow) if allow is not None else None,
            ignore_patterns=list(ignore) if ignore is not None else None,
        )
        return Path(str(found))

    return ask(target, act, "read")


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
