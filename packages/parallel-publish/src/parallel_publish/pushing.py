"""Whole checkpoints to the Hub: one at once, or those of a run in the background.

A repository holds them as `checkpoints/<step>/...`, each pushed in one commit with its manifest.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from parallel_ckpt import (
    DamagedCheckpoint,
    Manifest,
    RunFolder,
    StepFolder,
    read_manifest,
    resolve_checkpoint,
)
from parallel_ckpt.formats.hashing import hash_bytes
from parallel_ckpt.layout import CHECKPOINTS, MANIFEST, TEMPORARY, step_name
from parallel_ckpt.store.integrity import file_problems
from parallel_ckpt.store.manifest import FileRecord, signed_text
from parallel_config import ConfigError
from parallel_publish.client import note
from parallel_publish.hub import publish_files
from parallel_publish.retry import POLL_S, Stop, never
from parallel_publish.sharing import shareable, shareable_bytes
from parallel_publish.target import Target


@dataclass(frozen=True, kw_only=True)
class Push:
    """How pushing one checkpoint ended."""

    step: int
    """-1 where the checkpoint cannot be read."""
    path: Path
    """The checkpoint, which may be gone by now."""
    commit_url: str | None = None
    error: str = ""
    retry: str = ""
    """Command that pushes it again; empty when the checkpoint is gone."""

    @property
    def name(self) -> str:
        """Its name in lines for people."""
        return f"checkpoint {self.step}" if self.step >= 0 else str(self.path)


def push_checkpoint_to_hub(
    path: str | Path,
    target: Target,
    *,
    on_note: Callable[[str], None] = note,
    stop: Stop = never,
) -> str:
    """Push one committed checkpoint, whole, in one commit; returns the commit's address.

    No collective: one process calls it. Once `stop` is true it ends as soon as that harms nothing.

    Raises:
        CheckpointNotFound: there is no checkpoint at `path`.
        PublishError: it was not pushed.
    """
    folder = StepFolder(resolve_checkpoint(path))
    return _push(folder, target, on_note, stop)


@dataclass(frozen=True)
class _Job:
    """A checkpoint that is to be pushed."""

    step: int
    original: Path
    pinned: Path | None
    """The same files under a name that retention does not know; None: there are no hard links."""


class CheckpointPusher:
    """Pushes checkpoints one after another in a thread of its own. Main rank only.

    `push` returns at once: it pins the files by a second name, so that retention may delete the
    checkpoint meanwhile. Nothing here is a collective and nothing raises into the training.

    A Hub that is slower than the saves would let pinned checkpoints fill the disk: at most
    `max_waiting` wait, beyond that the oldest is left out and reported as failed.
    """

    def __init__(
        self, target: Target, *, max_waiting: int = 2, on_note: Callable[[str], None] = note
    ) -> None:
        self._target = target
        self._max_waiting = max_waiting
        self._on_note = on_note
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._current: _Job | None = None
        self._closed = False
        self._results: list[Push] = []
        self._thread: threading.Thread | None = None

    def push(self, path: str | Path) -> None:
        """Have a committed checkpoint pushed. `close` returns the errors."""
        try:
            folder = StepFolder(resolve_checkpoint(path))
            job = _Job(read_manifest(folder).step, folder.path, _pin(folder))
        except (ConfigError, OSError) as error:
            # A checkpoint that cannot be read is a failed push: the training goes on.
            self._end(Push(step=-1, path=Path(path), error=str(error)))
            return
        with self._changed:
            self._waiting.append(job)
            # The oldest one goes: a resume wants the newest.
            late = self._waiting.popleft() if len(self._waiting) > self._max_waiting else None
            self._changed.notify()
        if late is not None:
            self._leave_out(late, "left out, since newer ones are waiting and the Hub is slow")
        if self._thread is None:
            # A daemon, started by the first push: a run that pushes nothing has no thread, and a
            # Hub that hangs does not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="hub-push", daemon=True)
            self._thread.start()

    def close(
        self, timeout_s: float = 600.0, *, stop: Stop = never, stop_wait_s: float = 10.0
    ) -> tuple[Push, ...]:
        """Wait for what is under way, at most `timeout_s`; how every push ended.

        Once `stop` is true, at most `stop_wait_s` from then on.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop(thread, timeout_s, stop, stop_wait_s)
        with self._changed:
            return tuple(self._results)

    def _stop(self, thread: threading.Thread, timeout_s: float, stop: Stop, wait_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        waited_s = _join(thread, timeout_s, stop, wait_s)
        with self._changed:
            current, waiting = self._current, tuple(self._waiting)
            self._waiting.clear()  # nothing more is begun
        reason = f"was still being pushed after {waited_s:.0f} s"
        for job in waiting:
            self._leave_out(job, reason)
        if current is not None:  # it may still succeed, and reads its pinned files
            self._end(Push(step=current.step, path=current.original, error=reason), of=current)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            began = time.monotonic()
            try:
                url = _push(StepFolder(job.pinned or job.original), self._target, self._on_note)
            # Any error: the thread must live for the next checkpoint, and the training must not
            # notice.
            except Exception as error:
                push = Push(step=job.step, path=job.original, error=str(error))
            else:
                push = Push(step=job.step, path=job.original, commit_url=url)
            finally:
                _unpin(job)
            self._end(push, of=job, after_s=time.monotonic() - began)

    def _next(self) -> _Job | None:
        """The next job, once there is one; None when the pusher is closed and nothing waits."""
        with self._changed:
            self._current = None
            # Jobs that wait are still pushed after `close` has begun; `_stop` takes them away when
            # time is over.
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._current = self._waiting.popleft() if self._waiting else None
            return self._current

    def _leave_out(self, job: _Job, reason: str) -> None:
        self._end(Push(step=job.step, path=job.original, error=reason))
        _unpin(job)

    def _end(self, push: Push, *, of: _Job | None = None, after_s: float = 0.0) -> None:
        """Keep and report how a push ended.

        For the current job only the first report counts: the thread and `close` may both make one.
        """
        if push.error and push.path.exists():  # else retention has deleted it
            push = replace(push, retry=push_command(push.path, self._target))
        with self._changed:
            # The other side has reported it already.
            if of is not None and of is not self._current:
                return
            self._current = None if of is not None else self._current
            self._results.append(push)
        way = f"; retry with: {push.retry}" if push.retry else ""
        self._on_note(
            f"{push.name} not pushed: {push.error}{way}"
            if push.error
            else f"{push.name} pushed to {self._target.repo_id} in {after_s:.0f} s"
        )


def _push(
    folder: StepFolder, target: Target, on_note: Callable[[str], None], stop: Stop = never
) -> str:
    manifest = read_manifest(folder)
    prefix = f"{CHECKPOINTS}/{step_name(manifest.step)}/"
    # Sizes alone: checksums would read the whole checkpoint once more beside the training, and a
    # fetch compares them all.
    problems = list(file_problems(folder, manifest.files, "fast"))
    if problems:
        raise DamagedCheckpoint(problems, source=str(folder.path))
    return publish_files(
        target,
        {prefix + path: content for path, content in _shared(folder, manifest).items()},
        message=f"Checkpoint of step {manifest.step}",
        replaces=lambda path: path.startswith(prefix),
        on_note=on_note,
        stop=stop,
    )


def _shared(folder: StepFolder, manifest: Manifest) -> Mapping[str, Path | bytes]:
    """What is sent of a checkpoint: documents without paths of this machine, listed as they are."""
    files: dict[str, Path | bytes] = {}
    records: list[FileRecord] = []
    for record in manifest.files:
        content = shareable_bytes(folder.path / record.path)
        files[record.path] = folder.path / record.path if content is None else content
        if content is not None:
            # The manifest must list what is sent, or a fetch would call the checkpoint damaged.
            record = replace(record, size_bytes=len(content), checksum=hash_bytes(content))
        records.append(record)
    text = replace(manifest, files=tuple(records)).to_json()
    return files | {MANIFEST: signed_text(json.loads(shareable(text))).encode()}


def _join(thread: threading.Thread, timeout_s: float, stop: Stop, stop_wait_s: float) -> float:
    """Wait for a thread; the seconds that it took."""
    began = time.monotonic()
    deadline = began + timeout_s
    is_asked = False
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, POLL_S))
        if not is_asked and stop():
            is_asked = True
            deadline = min(deadline, time.monotonic() + stop_wait_s)
    return time.monotonic() - began


def _pin(folder: StepFolder) -> Path | None:
    """The checkpoint's files under a second, hidden name; None where there are no hard links.

    Copying them instead would hold up the training.
    """
    run = RunFolder(folder.path.parent.parent)
    # Under the name of a save under way: if this process dies, the next start clears it.
    pinned = run.hidden(int(folder.path.name), TEMPORARY, uuid.uuid4().hex[:12])
    try:
        shutil.copytree(folder.path, pinned, copy_function=os.link)
    except OSError:
        shutil.rmtree(pinned, ignore_errors=True)
        return None
    return pinned


def _unpin(job: _Job) -> None:
    if job.pinned is not None:
        shutil.rmtree(job.pinned, ignore_errors=True)


def push_command(path: Path, target: Target) -> str:
    """The command that pushes a checkpoint."""
    private = " --private" if target.private else ""
    return (
        f"ptrain publish {shlex.quote(str(path))} --resumable --repo_id {target.repo_id} "
        f"--revision {shlex.quote(target.revision)}{private}"
    )
