"""The one place that makes a checkpoint exist, replaces one, or takes one away.

Everything is written under a hidden name and becomes a checkpoint by one rename, so a process can
be killed between any two system calls here: what was committed before stays, and `mend` clears what
is left over.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel_ckpt.formats.hashing import flush_files, hashed_file
from parallel_ckpt.layout import (
    DELETED,
    LAST,
    PROBE,
    REPLACED,
    TEMPORARY,
    Hidden,
    RunFolder,
    StepFolder,
    parse_step,
    step_name,
)
from parallel_ckpt.store.manifest import Manifest, parse_manifest, sequence_of


def begin(run: RunFolder, step: int) -> StepFolder:
    """Make the folder that a checkpoint is written into; it is no checkpoint to any reader."""
    folder = StepFolder(run.hidden(step, TEMPORARY, _token()))
    folder.pretrained_model.mkdir(parents=True)
    folder.rng_folder.mkdir(parents=True)
    return folder


def commit(
    run: RunFolder, temporary: StepFolder, manifest: Manifest, unflushed: Iterable[Path] = ()
) -> list[str]:
    """Turn a fully written folder into the checkpoint of its step, and point `last` at it.

    Every file but the manifest and those in `unflushed` must be on disk already. A former
    checkpoint of the step makes way. Returns a line for each thing that did not succeed once the
    checkpoint existed: it exists all the same.

    Raises:
        OSError: there is no new checkpoint, and the former one is where it was.
        DamagedCheckpoint: the same; no reader would accept this manifest.
    """
    text = manifest.to_json()
    parse_manifest(text, temporary.manifest)
    with hashed_file(temporary.manifest, flush=False) as file:
        file.write(text.encode())
    flush_files([*unflushed, temporary.manifest])
    _flush_folders(temporary.path)
    final = run.step(manifest.step)
    former = run.hidden(manifest.step, REPLACED, _token())
    if os.path.lexists(final.path):
        os.rename(final.path, former)
    try:
        os.rename(temporary.path, final.path)
    except OSError:
        if os.path.lexists(former):
            os.rename(former, final.path)
        raise
    notes: list[str] = []
    with _noting(notes, f"{run.last}: does not point at {final.path.name} yet"):
        point_last(run, manifest.step)
    with _noting(notes, f"{final.path}: saved; what it replaced is not removed"):
        if os.path.lexists(former):
            _take_apart(run, former, manifest.step)
    return notes


def abandon(temporary: StepFolder) -> None:
    """Remove what a failed save has written, as far as the file system lets us."""
    shutil.rmtree(temporary.path, ignore_errors=True)


def delete(run: RunFolder, step: int) -> None:
    """Take a checkpoint away; at no moment is there half a checkpoint under its name."""
    _take_apart(run, run.step(step).path, step)


def mend(run: RunFolder) -> list[str]:
    """Clear what saves that died have left; a line for each thing done, or that cannot be done.

    Only the holder of the run's lock may call it: to anyone else the same folders are a save at
    work.

    Raises:
        OSError: a checkpoint that a replacement has moved aside cannot be put back.
    """
    notes: list[str] = []
    for aside in _moved_aside(run):
        home = run.step(aside.step).path
        os.rename(aside.path, home)
        notes.append(f"{home}: put back; its replacement was never finished.")
    for hidden in run.hidden_folders():
        name = hidden.path.name
        with _noting(notes, f"{name}: left by a save that did not finish, and not removed"):
            if hidden.role == REPLACED:
                _take_apart(run, hidden.path, hidden.step)
            else:
                _remove(hidden.path)
            notes.append(f"{name}: removed; it was left by a save that did not finish.")
    steps = run.committed_steps()
    if steps and os.path.islink(run.last) and not run.last.exists():
        with _noting(notes, f"{run.last}: points at nothing"):
            newest = max(steps, key=lambda step: (_order(run.step(step)), step))
            point_last(run, newest)
            notes.append(f"{run.last}: pointed at nothing; now at {step_name(newest)}.")
    for pattern in (f".{LAST}.*", f"{PROBE}*"):
        for leftover in run.checkpoints.glob(pattern):
            with _noting(notes, f"{leftover}: not removed"):
                leftover.unlink(missing_ok=True)
    return notes


def _moved_aside(run: RunFolder) -> list[Hidden]:
    """Of each step that is missing, the former checkpoint that was committed last."""
    found: dict[int, Hidden] = {}
    for hidden in run.hidden_folders():
        if hidden.role != REPLACED or os.path.lexists(run.step(hidden.step).path):
            continue
        other = found.get(hidden.step, hidden)
        found[hidden.step] = max(other, hidden, key=lambda aside: _order(StepFolder(aside.path)))
    return list(found.values())


def _order(folder: StepFolder) -> int:
    """Greater for what was committed later; least where that cannot be read."""
    sequence = sequence_of(folder)
    return -1 if sequence is None else sequence


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


def _take_apart(run: RunFolder, path: Path, step: int) -> None:
    """Remove a checkpoint under a name by which it is never put back half removed."""
    doomed = run.hidden(step, DELETED, _token())
    os.rename(path, doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


@contextmanager
def _noting(notes: list[str], what: str) -> Iterator[None]:
    """Turn an error of the file system into a line; nothing that is kept hangs on it."""
    try:
        yield
    except OSError as error:
        notes.append(f"{what}: {reason(error)}")


def reason(error: OSError) -> str:
    """What the file system said, and of which file."""
    return f"{error.strerror or error}" + (f" ({error.filename})." if error.filename else ".")


def _token() -> str:
    return uuid.uuid4().hex[:12]
