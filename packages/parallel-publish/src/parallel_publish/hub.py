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
    merges: Mapping[str, Callable[[bytes], bytes]] | None = None,
    on_note: Callable[[str], None] = note,
    stop: Stop = never,
) -> str:
    """Send files or bytes, by path in the repository, in one commit; returns its address.

    Files there for which `replaces` is true and that are not sent are removed by the same commit.
    Of a path in `merges` that is there already, what its function makes of it is sent instead.
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
        # Asked anew at each attempt: after a 412 another commit is the head, with other files.
        head = api.model_info(target.repo_id, revision=target.revision)
        there = [sibling.rfilename for sibling in head.siblings or ()]
        stale = [path for path in there if replaces(path) and path not in files]
        # At the very commit that the new one follows: nothing that a person wrote in between is
        # lost.
        merged = {
            name: merge(_fetched(target, name, head.sha))
            for name, merge in (merges or {}).items()
            if name in there and name in files
        }
        added = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in sorted({**files, **merged}.items())
        ]
        # The large files are sent by a call of their own. They change nothing until the commit
        # names them, so the time in which a caller must not leave is that of the commit alone.
        api.preupload_lfs_files(target.repo_id, added, revision=target.revision)
        committing.set()
        try:
            # Asked after the event is set: the caller then either waits for us or has left.
            if left.is_set() or stop():  # the caller has left, with an error that says so
                raise Stopped
            # create_commit and not upload_folder, which may split into several commits. If the
            # answer to a former attempt was lost, the client finds all files unchanged there and
            # returns that commit instead of a second one.
            made = api.create_commit(
                target.repo_id,
                [*added, *(CommitOperationDelete(path) for path in stale)],
                commit_message=message,
                revision=target.revision,
                # With it the Hub refuses (412) if another process has committed since `head` was
                # read; without it the two would undo each other.
                parent_commit=head.sha,
            )
        finally:
            committing.clear()
        return str(made.commit_url)

    try:
        return ask(target, commit, "written", on_note, _but_for(committing, stop))
    except PublishError:
        # The thread of the request lives on; from now on it must not begin a commit.
        left.set()
        # Only in this case is it unknown whether the Hub has made the commit.
        if not (stop() and committing.is_set()):
            raise
        raise PublishError.of(
            f"{target.repo_id}@{target.revision}",
            "may be written: stopped on request, while the commit waited for its answer.",
        ) from None


def _fetched(target: Target, path: str, commit: str | None) -> bytes:
    from huggingface_hub import hf_hub_download

    found = hf_hub_download(
        target.repo_id, path, revision=commit, token=target.token, endpoint=endpoint()
    )
    return Path(found).read_bytes()


def list_files(target: Target) -> list[RemoteFile]:
    """Every file of the revision.

    Raises:
        PublishError: the repository or revision is missing, or the token may not read it.
    """
    refuse_setup(target)

    def act() -> list[RemoteFile]:
        entries = client(target).list_repo_tree(
            target.repo_id,
            recursive=True,
            revision=target.revision,
            repo_type=target.repo_type,
        )
        return [
            RemoteFile(path=entry.path, size_bytes=entry.size)
            for entry in entries
            # Folders are listed as well, without a size.
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
        lambda: str(
            client(target)
            .repo_info(target.repo_id, revision=target.revision, repo_type=target.repo_type)
            .sha
        ),
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
            repo_type=target.repo_type,
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
            # The wait is counted from the first request to leave, not from the commit.
            since.append(time.monotonic())
        return not committing.is_set() or time.monotonic() - since[0] > COMMIT_WAIT_S

    return should_leave
