"""Whole checkpoints on the Hub: pushed in the background, found by number, fetched and verified.

A repository holds them as `checkpoints/<step>/...`, each pushed in one commit with its manifest.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt import (
    CheckpointNotFound,
    DamagedCheckpoint,
    Manifest,
    RunFolder,
    StepFolder,
    read_manifest,
    resolve_checkpoint,
)
from parallel_ckpt._ranks import all_ranks
from parallel_ckpt.integrity import file_problems
from parallel_ckpt.layout import CHECKPOINTS, MANIFEST, TEMPORARY, step_name
from parallel_ckpt.manifest import parse_manifest
from parallel_config import ConfigError, Problem
from parallel_publish.errors import PublishError
from parallel_publish.hub import (
    RemoteFile,
    Target,
    download,
    list_files,
    note,
    publish_files,
    revision_sha,
)

_MANIFESTS = re.compile(rf"{CHECKPOINTS}/(\d{{6,}})/{re.escape(MANIFEST)}")


@dataclass(frozen=True, kw_only=True)
class Push:
    """How pushing one checkpoint ended."""

    step: int
    commit_url: str | None = None
    error: str = ""
    retry: str = ""
    """Call or command that pushes it again."""


def push_checkpoint_to_hub(
    path: str | Path, target: Target, *, on_note: Callable[[str], None] = note
) -> str:
    """Push one committed checkpoint, whole, in one commit; returns the commit's address.

    No collective: one process calls it.

    Raises:
        CheckpointNotFound: there is no checkpoint at `path`.
        PublishError: it was not pushed.
    """
    folder = StepFolder(resolve_checkpoint(path))
    return _push(folder, target, on_note)


class CheckpointPusher:
    """Pushes checkpoints one after another in a thread of its own. Main rank only.

    `push` returns at once: it pins the files by a second name, so that retention may delete the
    checkpoint meanwhile. Nothing here is a collective and nothing raises into the training.
    """

    def __init__(self, target: Target, *, on_note: Callable[[str], None] = note) -> None:
        self._target = target
        self._on_note = on_note
        self._queue: queue.SimpleQueue[tuple[StepFolder, Path] | None] = queue.SimpleQueue()
        self._results: list[Push] = []
        self._waiting: list[int] = []
        self._thread: threading.Thread | None = None

    def push(self, path: str | Path) -> None:
        """Have a committed checkpoint pushed. Errors are told by `close`."""
        try:
            folder = StepFolder(resolve_checkpoint(path))
            step = read_manifest(folder).step
            pinned = _pin(folder)
        except (ConfigError, OSError) as error:
            self._note_failure(Push(step=-1, error=str(error), retry=_retry(path, self._target)))
            return
        self._waiting.append(step)
        self._queue.put((folder, pinned))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hub-push", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float = 600.0) -> tuple[Push, ...]:
        """Wait for what is under way, at most `timeout_s`; how every push ended."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                done = {push.step for push in self._results}
                for step in self._waiting:
                    if step not in done:
                        error = f"was still being pushed after {timeout_s:.0f} s"
                        self._note_failure(Push(step=step, error=error))
            self._thread = None
        return tuple(self._results)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            original, pinned = item
            try:
                self._push_one(original, StepFolder(pinned))
            finally:
                shutil.rmtree(pinned, ignore_errors=True)

    def _push_one(self, original: StepFolder, pinned: StepFolder) -> None:
        step = read_manifest(pinned).step
        began = time.monotonic()
        try:
            url = _push(pinned, self._target, self._on_note)
        except Exception as error:
            retry = _retry(original.path, self._target)
            self._note_failure(Push(step=step, error=str(error), retry=retry))
        else:
            self._results.append(Push(step=step, commit_url=url))
            self._on_note(
                f"checkpoint {step} pushed to {self._target.repo_id} "
                f"in {time.monotonic() - began:.0f} s"
            )

    def _note_failure(self, push: Push) -> None:
        self._results.append(push)
        self._on_note(f"checkpoint {push.step} not pushed: {push.error}; retry with {push.retry}")


def newest_on_hub(target: Target) -> tuple[int, list[str]]:
    """Step of the newest complete checkpoint, by number, and a line for each that was skipped.

    Raises:
        CheckpointNotFound: the repository holds none.
    """
    files = list_files(target)
    skipped: list[str] = []
    for step in sorted(_steps(files), reverse=True):
        problem = _incomplete(target, step, files)
        if problem is None:
            return step, skipped
        skipped.append(f"{target.repo_id}: checkpoint {step} {problem}")
    raise CheckpointNotFound.of(
        f"{target.repo_id}@{target.revision}",
        f"holds no complete checkpoint below {CHECKPOINTS}/"
        + (f"; {len(skipped)} incomplete." if skipped else "."),
        "Push one with push_checkpoint_to_hub, or train with --publish.push_checkpoints.",
    )


def fetch_checkpoint(target: Target, run_dir: str | Path, *, step: int | None = None) -> Path:
    """Download a checkpoint into a run folder and verify every file; returns its step folder.

    None means the newest complete one. One that is there already and whole is not fetched again.
    No collective: see `fetch_on_main`. Nothing that was downloaded is executed.

    Raises:
        CheckpointNotFound: there is none on the Hub.
        DamagedCheckpoint: what came differs from its manifest.
    """
    from dataclasses import replace

    target = replace(target, revision=revision_sha(target))  # one state for all that follows
    number = newest_on_hub(target)[0] if step is None else step
    run = RunFolder(Path(run_dir).expanduser().absolute())
    final = run.step(number)
    if final.is_committed and not _problems(final):
        return final.path
    if final.path.exists():
        raise PublishError.of(
            final.path, "is there already, and differs from what it should be.", "Move it away."
        )
    incoming = run.hidden(number, TEMPORARY, uuid.uuid4().hex[:12])
    try:
        pattern = f"{CHECKPOINTS}/{step_name(number)}/*"
        download(target, allow=[pattern], into=incoming)
        fetched = StepFolder(incoming / CHECKPOINTS / step_name(number))
        problems = _problems(fetched)
        if problems:
            raise DamagedCheckpoint(problems, source=f"{target.repo_id}, checkpoint {number}")
        os.rename(fetched.path, final.path)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return final.path


def fetch_on_main(target: Target, run_dir: str | Path, *, step: int | None = None) -> Path:
    """Collective: every rank. `fetch_checkpoint` on the main rank, into a folder that all share."""
    return Path(all_ranks().on_main(lambda: str(fetch_checkpoint(target, run_dir, step=step))))


def _push(folder: StepFolder, target: Target, on_note: Callable[[str], None]) -> str:
    manifest = read_manifest(folder)
    prefix = f"{CHECKPOINTS}/{step_name(manifest.step)}/"
    problems = list(file_problems(folder, manifest.files, "fast"))
    if problems:
        raise DamagedCheckpoint(problems, source=str(folder.path))
    files = {prefix + record.path: folder.path / record.path for record in manifest.files}
    return publish_files(
        target,
        files | {prefix + MANIFEST: folder.manifest},
        message=f"Checkpoint of step {manifest.step}",
        replaces=lambda path: path.startswith(prefix),
        on_note=on_note,
    )


def _pin(folder: StepFolder) -> Path:
    """A copy of a checkpoint's tree under a hidden name, by hard links where they are to be had."""
    run = RunFolder(folder.path.parent.parent)
    # Under the name of a save under way: if this process dies, the next start clears it.
    pinned = run.hidden(int(folder.path.name), TEMPORARY, uuid.uuid4().hex[:12])
    try:
        shutil.copytree(folder.path, pinned, copy_function=_link)
    except BaseException:
        shutil.rmtree(pinned, ignore_errors=True)
        raise
    return pinned


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _steps(files: Sequence[RemoteFile]) -> list[int]:
    found = (_MANIFESTS.fullmatch(file.path) for file in files)
    return [int(match[1]) for match in found if match and step_name(int(match[1])) == match[1]]


def _incomplete(target: Target, step: int, files: Sequence[RemoteFile]) -> str | None:
    """Why a checkpoint on the Hub is not whole, None when it is."""
    prefix = f"{CHECKPOINTS}/{step_name(step)}/"
    sizes = {file.path: file.size_bytes for file in files}
    try:
        manifest = _remote_manifest(target, prefix + MANIFEST)
    except (CheckpointNotFound, DamagedCheckpoint) as error:  # not: the Hub is out of reach
        return f"has no readable manifest: {error}"
    if manifest.step != step:
        return f"holds the manifest of step {manifest.step}"
    wrong = [r.path for r in manifest.files if sizes.get(prefix + r.path) != r.size_bytes]
    return f"lacks {', '.join(wrong[:3])} as its manifest lists it" if wrong else None


def _remote_manifest(target: Target, path: str) -> Manifest:
    folder = download(target, allow=[path])
    file = folder / path
    if not file.is_file():
        raise CheckpointNotFound.of(path, "is not in the repository.")
    return parse_manifest(file.read_bytes(), Path(path))


def _problems(folder: StepFolder) -> list[Problem]:
    try:
        return list(file_problems(folder, read_manifest(folder).files, "full"))
    except ConfigError as error:
        return list(error.problems)


def _retry(path: object, target: Target) -> str:
    return f"push_checkpoint_to_hub({str(path)!r}, Target(repo_id={target.repo_id!r}))"
