"""The one place that makes a checkpoint exist, replaces one, or takes one away.

Everything is written under a hidden name and becomes a checkpoint by one rename. So a process can
be killed between any two system calls here: what was committed before stays, and `store/mend.py`
puts right what is left over. The same holds when the power fails: decision 0015 says what a disk
may forget. The order of the calls is what makes this true; each says why.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel_ckpt.formats.hashing import flush_files, hashed_file
from parallel_ckpt.layout import (
    DELETED,
    REPLACED,
    TEMPORARY,
    RunFolder,
    StepFolder,
    parse_step,
    step_name,
)
from parallel_ckpt.store.manifest import Manifest, parse_manifest

_CANNOT_FLUSH = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""What a file system says that cannot flush folders. After any other error names are not safe."""


def begin(run: RunFolder, step: int) -> StepFolder:
    """Make the folder that a checkpoint is written into; no reader takes it for a checkpoint."""
    folder = StepFolder(run.hidden(step, TEMPORARY, token()))
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
    parse_manifest(text, temporary.manifest)  # before anything moves: a reader must accept it
    # The manifest comes last: a folder without one is not a checkpoint, so a copy of the folder
    # that was cut short is never taken for one.
    with hashed_file(temporary.manifest, flush=False) as file:
        file.write(text.encode())
    # Contents before names, names before the rename: a file system may bring the rename to disk
    # first, and after a power cut the checkpoint would hold empty files.
    flush_files([*unflushed, temporary.manifest])
    _flush_folders(temporary.path)
    final = run.step(manifest.step)
    former = run.hidden(manifest.step, REPLACED, token())
    before = read_last(run)
    # A rename does not replace a folder that holds files, so the former checkpoint steps aside. A
    # death between these two renames leaves its step without a folder: `mend` puts it back.
    if os.path.lexists(final.path):
        os.rename(final.path, former)
    notes: list[str] = []
    try:
        os.rename(temporary.path, final.path)  # from here on the checkpoint exists
        # After the rename: `last` never points at something that is not there.
        with noting(notes, f"{run.last}: does not point at {final.path.name} yet"):
            point_last(run, manifest.step)
        # One flush for all three names. Until it is done, the former one is the only safe copy.
        flush_folder(run.checkpoints)
    except OSError:
        _undo(run, temporary, former, manifest.step, before)
        raise
    with noting(notes, f"{final.path}: saved; what it replaced is not removed"):
        if os.path.lexists(former):
            take_apart(run, former, manifest.step)
    return notes


def _undo(
    run: RunFolder, temporary: StepFolder, former: Path, step: int, before: int | None
) -> None:
    """Give every name back what it had before a commit that failed."""
    final = run.step(step).path
    if not os.path.lexists(temporary.path):
        os.rename(final, temporary.path)
    if os.path.lexists(former):
        os.rename(former, final)
    with contextlib.suppress(OSError):  # `last` is mended by the next one who opens the run
        if before is not None and read_last(run) != before:
            point_last(run, before)


def abandon(temporary: StepFolder) -> None:
    """Remove what a failed save has written, as far as the file system lets us."""
    shutil.rmtree(temporary.path, ignore_errors=True)


def delete(run: RunFolder, step: int) -> None:
    """Delete a checkpoint; at no moment does half a checkpoint have its name."""
    take_apart(run, run.step(step).path, step)


def point_last(run: RunFolder, step: int) -> None:
    """Point `last` at a committed step in one move; the caller flushes the folder.

    Where the file system has no links, `last` is a file that holds the name. A folder of that name
    (a copied tree) is left alone: checkpoints are found by their manifests, not by `last`.
    """
    if run.last.is_dir() and not run.last.is_symlink():
        return
    name = step_name(step)
    spare = run.last.with_name(f".{run.last.name}.{token()}")
    try:
        os.symlink(name, spare)
    except OSError:
        with hashed_file(spare) as file:  # flushed: the name must not lead to an empty file
            file.write(f"{name}\n".encode())
    os.replace(spare, run.last)  # a new link over the old one: no moment without `last`


def read_last(run: RunFolder) -> int | None:
    """The step that `last` points at; None when it points at nothing committed."""
    step = parse_step(last_name(run) or "")
    return step if step is not None and run.step(step).is_committed else None


def last_name(run: RunFolder) -> str | None:
    """The folder's name that `last` holds, as a link or as a file; None when it holds none."""
    try:
        if run.last.is_symlink():
            return os.path.basename(os.readlink(run.last))
        if run.last.is_file():
            return run.last.read_text(encoding="utf-8")[:64].strip()
    except (OSError, UnicodeDecodeError):
        return None
    return None


def make_folder(path: Path) -> None:
    """Make a folder with its parents; all their names are on disk when it returns."""
    path.mkdir(parents=True, exist_ok=True)
    # Whichever of them is new, and who has made it, is not known. Flushing what is on disk already
    # costs next to nothing.
    for folder in path.absolute().parents:
        try:
            flush_folder(folder)
        except PermissionError:
            return  # We cannot have made a name in it.
        if os.path.ismount(folder):
            return


def flush_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut, where the file system can do so.

    Raises:
        OSError: they may not survive it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse to flush a folder; their renames are durable.
        if error.errno not in _CANNOT_FLUSH:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _flush_folders(root: Path) -> None:
    # From the leaves up: a name is flushed only after what it leads to.
    for path, _, _ in os.walk(root, topdown=False):
        flush_folder(Path(path))


def take_apart(run: RunFolder, path: Path, step: int) -> None:
    """Remove a checkpoint. It is renamed first: under the new name it is never put back."""
    doomed = run.hidden(step, DELETED, token())
    os.rename(path, doomed)
    # A disk may forget the rename and keep the removals: half a checkpoint would have the old name.
    flush_folder(run.checkpoints)
    remove(doomed)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that it holds."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


@contextmanager
def noting(notes: list[str], what: str) -> Iterator[None]:
    """Turn an error of the file system into a note; no checkpoint depends on what failed."""
    try:
        yield
    except OSError as error:
        notes.append(f"{what}: {reason(error)}")


def reason(error: OSError) -> str:
    """What the file system said, and of which file."""
    return f"{error.strerror or error}" + (f" ({error.filename})." if error.filename else ".")


def token() -> str:
    """Makes a hidden name unique."""
    return uuid.uuid4().hex[:12]
