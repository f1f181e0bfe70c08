"""Folders that wait to be sent, the room that they need, and the commands that send them."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from parallel_ckpt.layout import step_name
from parallel_publish.bundle import Dtype
from parallel_publish.config import PublishConfig
from parallel_publish.errors import PublishError
from parallel_publish.target import Target


def bundle_folder(root: Path, step: int, target: Target) -> Path:
    """Where the model of a step waits for a repository: a further try takes its place."""
    # Quoted, because the name of a branch may hold slashes.
    branch = "" if target.revision == "main" else f"@{quote(target.revision, safe='')}"
    return root / f"publish-{step_name(step)}-{target.repo_id.replace('/', '--')}{branch}"


def is_kept_bundle(folder: Path) -> bool:
    """Whether `bundle_folder` has named it."""
    return re.fullmatch(r"publish-\d{6,}-.+--.+", folder.name) is not None


def check_disk(folder: Path, needed_bytes: int, what: str = "the files to publish") -> None:
    """Raise PublishError unless the disk of `folder` has room for what will be written there."""
    parent = folder.absolute()
    # The folder may not exist yet; the nearest one that does is on the same disk.
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise PublishError.of(
            folder,
            f"has {free:,} bytes free, but {what} need {needed_bytes:,}.",
            "Free some space, or use another folder.",
        )


@contextmanager
def empty_folder(root: Path, folder: Path | None) -> Iterator[Path]:
    """An empty folder for this process alone; None makes one with a new name.

    Raises:
        PublishError: it cannot be written, or another process sends what is in it.
    """
    descriptor = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        if folder is None:
            # Below the root and not in /tmp: weights can only be linked on the same disk.
            folder = Path(tempfile.mkdtemp(prefix=".publish-", dir=root))
        else:
            folder.mkdir(exist_ok=True)
            # The lock comes first: until it is held, another process may be sending these files.
            descriptor = _locked(folder)
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    except OSError as error:
        raise PublishError.of(
            folder or root,
            f"cannot be written: {error.strerror}.",
            "Publish a copy of the run that lies where you may write.",
        ) from None
    try:
        yield folder
    finally:
        # Closing releases the lock. The system does that too if this process is killed.
        if descriptor is not None:
            os.close(descriptor)


def _locked(folder: Path) -> int:
    """The folder, open and locked until it is closed or this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise PublishError.of(
            folder, "is being sent by another process.", "Wait until that one has ended."
        ) from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def command_for(folder: Path, target: Target, options: Sequence[str] = ()) -> str:
    """The command that publishes what lies in a folder."""
    words = ["ptrain", "publish", str(folder), "--repo_id", target.repo_id, *options]
    words += [] if target.revision == "main" else ["--revision", target.revision]
    words += ["--private"] if target.private else []
    return shlex.join(words)


def card_options(config: PublishConfig) -> Iterator[str]:
    """Flags of `ptrain publish` that the card is made from."""
    # Where no bundle was built there is no card, so the command must repeat what the card needs.
    for name in ("license", "base_model"):
        value = getattr(config, name)
        if value is not None:
            yield from (f"--{name}", value)
    if config.tags:
        yield from ("--tags", *config.tags)


def weight_options(dtype: Dtype, max_shard_size: str) -> Iterator[str]:
    """Flags of `ptrain publish` that the weights are made from."""
    if dtype != "keep":
        yield from ("--dtype", dtype)
    if max_shard_size != "5GB":
        yield from ("--max_shard_size", max_shard_size)
