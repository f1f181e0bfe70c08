"""Putting right what saves that were killed have left, and opening a run folder for writing."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.layout import (
    CONVERTING,
    LAST,
    PROBE,
    REPLACED,
    RunFolder,
    StepFolder,
    step_name,
)
from parallel_ckpt.ranks import Ranks, all_ranks
from parallel_ckpt.store.commit import (
    flush_folder,
    make_folder,
    noting,
    point_last,
    remove,
    take_apart,
)
from parallel_ckpt.store.find import is_copied_last, moved_aside, order
from parallel_ckpt.store.integrity import file_problems
from parallel_ckpt.store.lock import RunLock
from parallel_ckpt.store.manifest import read_manifest
from parallel_ckpt.store.workspace import clear


def mend_run(run_dir: str | Path) -> list[str]:
    """Collective: every rank. Put right what a save that was killed left in a run folder.

    A checkpoint that was being replaced is put back, leftovers are removed, and a `last` that
    points at nothing points at the newest checkpoint again. Returns a line for each thing that was
    done or cannot be done, the same on every rank.

    Raises:
        CheckpointError: another run writes here, or a rank does not see the folder.
    """
    run, ranks = RunFolder(Path(run_dir).expanduser().absolute()), all_ranks("mend_run")
    lock, notes = open_run(run, ranks)
    if lock is not None:
        lock.release()
    return notes


def open_run(run: RunFolder, ranks: Ranks) -> tuple[RunLock | None, list[str]]:
    """Collective: every rank. Lock a run folder, mend it, and check that every rank sees it.

    Returns the lock, which the main rank alone holds, and the lines of `mend_run`.

    Raises:
        CheckpointError: as for `mend_run`; nobody holds the lock then.
    """
    held: list[RunLock] = []
    token = uuid.uuid4().hex

    def take() -> tuple[list[str], str]:
        make_folder(run.checkpoints)
        lock, notes = RunLock.acquire(run.lock)
        held.append(lock)
        # Only under the lock: without it the same folders may be a save that is under way.
        notes += mend(run)
        # After mending, which removes the probes of others.
        (run.checkpoints / f"{PROBE}{token}").write_text(token, encoding="utf-8")
        return notes, token

    try:
        notes, written = ranks.from_main(take)
        ranks.together(lambda: _require_probe(run, written, ranks.rank))
    except BaseException:
        for lock in held:
            lock.release()
        raise
    finally:
        if ranks.is_main:
            (run.checkpoints / f"{PROBE}{token}").unlink(missing_ok=True)
    return (held[0] if held else None), notes


def _require_probe(run: RunFolder, token: str, rank: int) -> None:
    try:
        found = (run.checkpoints / f"{PROBE}{token}").read_text(encoding="utf-8")
    except OSError:
        found = ""
    if found != token:
        raise CheckpointError.of(
            "output_dir",
            f"= {str(run.path)!r} is not shared by rank {rank}: it does not see a file that the "
            "main rank has just written there.",
            "Use --output_dir on a file system that every rank mounts.",
        )


def mend(run: RunFolder) -> list[str]:
    """As `mend_run`, in one process that holds the run's lock.

    Raises:
        OSError: a checkpoint that a replacement has moved aside cannot be put back.
    """
    notes: list[str] = []
    # First: all that follows removes folders, and these are the only copies of their steps.
    for aside in moved_aside(run):
        home = run.step(aside.step).path
        os.rename(aside.path, home)
        notes.append(f"{home}: put back; its replacement was never finished.")
    hidden_folders = run.hidden_folders()
    if hidden_folders:
        # A process that was killed may have left renames that are not on disk yet. Removing what
        # they have moved away would empty it under its former name after a power cut.
        flush_folder(run.checkpoints)
    for hidden in hidden_folders:
        name = hidden.path.name
        with noting(notes, f"{name}: left by a save that did not finish, and not removed"):
            # A replaced checkpoint is still whole: a death while it is removed in place would
            # leave half of it under a name that is put back.
            if hidden.role == REPLACED:
                take_apart(run, hidden.path, hidden.step)
            else:
                remove(hidden.path)
            notes.append(f"{name}: removed; it was left by a save that did not finish.")
    notes += _mend_last(run)
    for step in run.committed_steps():
        parent = run.step(step).pretrained_model
        notes += [f"{path}: removed; a conversion left it." for path in clear(parent, CONVERTING)]
    for pattern in (f".{LAST}.*", f"{PROBE}*"):
        for leftover in run.checkpoints.glob(pattern):
            with noting(notes, f"{leftover}: not removed"):
                leftover.unlink(missing_ok=True)
    return notes


def _mend_last(run: RunFolder) -> list[str]:
    notes: list[str] = []
    if is_copied_last(run.last):
        with noting(notes, f"{run.last}: is a folder, not a link"):
            notes.append(_place_copied_last(run))
    steps = run.committed_steps()
    leads_nowhere = os.path.islink(run.last) and not run.last.exists()
    if steps and (leads_nowhere or not os.path.lexists(run.last)):
        with noting(notes, f"{run.last}: points at nothing"):
            newest = max(steps, key=lambda step: (order(run.step(step)), step))
            # Not flushed: the next one who opens the run would do it again.
            point_last(run, newest)
            if leads_nowhere:
                notes.append(f"{run.last}: pointed at nothing; now at {step_name(newest)}.")
    return notes


def _place_copied_last(run: RunFolder) -> str:
    """Put away a `last` that a copy of the run has made a folder of its own; a line about it."""
    copy = StepFolder(run.last)
    try:
        manifest = read_manifest(copy)
        home = run.step(manifest.step)
        if not os.path.lexists(home.path):
            os.rename(copy.path, home.path)
            return f"{run.last}: was a folder, not a link; it is {home.path.name} now."
        # Removed only where all of it is there a second time.
        if read_manifest(home) == manifest and not any(file_problems(home, manifest.files, "fast")):
            take_apart(run, copy.path, manifest.step)
            return f"{run.last}: was a copy of {home.path.name}, not a link; removed."
    except CheckpointError:
        pass
    return (
        f"{run.last}: is a folder, not a link, and holds files that do not belong to a step "
        "folder. Saves do not update it. Move it away."
    )
