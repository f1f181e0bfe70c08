"""The one place that makes a checkpoint exist, replaces one, or takes one away.

Everything is written under a hidden name and becomes a checkpoint by one rename, so a process can
be killed between any two system calls here: what was committed before stays, and `mend` clears what
is left over.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from parallel_ckpt.hashing import flush_files, hashed_file
from parallel_ckpt.layout import (
    DELETED,
    LAST,
    PROBE,
    REPLACED,
    TEMPORARY,
    RunFolder,
    StepFolder,
    parse_step,
    step_name,
)
from parallel_ckpt.manifest import Manifest


def begin(run: RunFolder, step: int) -> StepFolder:
    """Make the folder that a checkpoint is written into; it is no checkpoint to any reader."""
    folder = StepFolder(run.hidden(step, TEMPORARY, _token()))
    folder.pretrained_model.mkdir(parents=True)
    folder.rng_folder.mkdir(parents=True)
    return folder


def commit(
    run: RunFolder, temporary: StepFolder, manifest: Manifest, unflushed: Iterable[Path] = ()
) -> StepFolder:
    """Turn a fully written folder into the checkpoint of its step, and point `last` at it.

    Every file but the manifest and those in `unflushed` must be on disk already. A former
    checkpoint of the step makes way.
    """
    with hashed_file(temporary.manifest, flush=False) as file:
        file.write(manifest.to_json().encode())
    flush_files([*unflushed, temporary.manifest])
    _flush_folders(temporary.path)
    final = run.step(manifest.step)
    former = run.hidden(manifest.step, REPLACED, _token())
    if os.path.lexists(final.path):
        os.rename(final.path, former)
    os.rename(temporary.path, final.path)
    point_last(run, manifest.step)
    _remove(former)
    return final


def abandon(temporary: StepFolder) -> None:
    """Remove what a failed save has written, as far as the file system lets us."""
    shutil.rmtree(temporary.path, ignore_errors=True)


def delete(run: RunFolder, step: int) -> None:
    """Take a checkpoint away; at no moment is there half a checkpoint under its name."""
    doomed = run.hidden(step, DELETED, _token())
    os.rename(run.step(step).path, doomed)
    _remove(doomed)


def mend(run: RunFolder) -> list[str]:
    """Clear what saves that died have left; a line for each thing done.

    Only the holder of the run's lock may call it: to anyone else the same folders are a save at
    work.
    """
    notes: list[str] = []
    for hidden in run.hidden_folders():
        home = run.step(hidden.step).path
        if hidden.role == REPLACED and not os.path.lexists(home):
            os.rename(hidden.path, home)
            notes.append(f"{home}: put back; its replacement was never finished.")
        else:
            _remove(hidden.path)
            notes.append(f"{hidden.path.name}: removed; it was left by a save that did not finish.")
    steps = run.committed_steps()
    if steps and os.path.islink(run.last) and not run.last.exists():
        point_last(run, steps[-1])
        notes.append(f"{run.last}: pointed at nothing; now at {step_name(steps[-1])}.")
    for pattern in (f".{LAST}.*", f"{PROBE}*"):
        for leftover in run.checkpoints.glob(pattern):
            leftover.unlink(missing_ok=True)
    return notes


def point_last(run: RunFolder, step: int) -> None:
    """Point `last` at a committed step in one move.

    Where links are not to be had it is a file that holds the name. A folder of that name (a copied
    tree) is left alone: checkpoints are found by their manifests, not by `last`. All names in
    the folder are on disk when it returns.
    """
    if run.last.is_dir() and not run.last.is_symlink():
        flush_folder(run.checkpoints)
        return
    name = step_name(step)
    spare = run.last.with_name(f".{run.last.name}.{_token()}")
    try:
        os.symlink(name, spare)
    except OSError:
        spare.write_text(name + "\n", encoding="utf-8")
    os.replace(spare, run.last)
    flush_folder(run.checkpoints)


def read_last(run: RunFolder) -> int | None:
    """The step that `last` points at; None when it points at nothing committed."""
    try:
        if run.last.is_symlink():
            name = os.path.basename(os.readlink(run.last))
        elif run.last.is_file():
            name = run.last.read_text(encoding="utf-8")[:64].strip()
        else:
            return None
    except (OSError, UnicodeDecodeError):
        return None
    step = parse_step(name)
    return step if step is not None and run.step(step).is_committed else None


def flush_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut, where the file system can do so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # Some network file systems refuse to sync a folder; their renames are durable.
    finally:
        os.close(descriptor)


def _flush_folders(root: Path) -> None:
    for path, _, _ in os.walk(root, topdown=False):
        flush_folder(Path(path))


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _token() -> str:
    return uuid.uuid4().hex[:12]
