"""Whether a checkpoint is what its manifest says: its files, its step, and where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.checked_json import parse_json
from parallel_ckpt.formats.hashing import hash_file
from parallel_ckpt.formats.limits import shown
from parallel_ckpt.layout import MANIFEST, StepFolder, step_of
from parallel_ckpt.store.manifest import FileRecord, Manifest
from parallel_config import Problem

Verify = Literal["full", "fast"]
"""`fast` compares sizes, `full` also compares checksums."""


def file_problems(
    folder: StepFolder, records: Sequence[FileRecord], verify: Verify
) -> Iterator[Problem]:
    """One line per file that is missing, of another size, or of another checksum."""
    root = folder.path.resolve()
    for record in records:
        path = folder.path / record.path
        problem = _problem(folder, record, verify)
        if problem is None and not path.resolve().is_relative_to(root):
            problem = "is a link that leads out of the checkpoint."
        if problem is not None:
            yield Problem(str(path), problem)


def identity_problems(folder: StepFolder, manifest: Manifest) -> Iterator[Problem]:
    """One line per fact about the checkpoint that its folder or `training_step.json` contradicts.

    Two step folders that were swapped are each whole, and each would be resumed as the other.
    """
    step = step_of(folder.path.name)
    if step is not None and step != manifest.step:
        yield Problem(
            str(folder.path),
            f"holds the checkpoint of step {manifest.step}: the folder was renamed or swapped.",
        )
    path = folder.training_step
    if path.relative_to(folder.path).as_posix() not in {file.path for file in manifest.files}:
        yield Problem(str(path), f"is needed, but {MANIFEST} does not list it.")
        return
    try:
        facts = parse_json(path.read_bytes(), path)
    except OSError:
        return  # missing or unreadable: a problem of the file, which is named as one
    except CheckpointError as error:
        yield from error.problems
        return
    yield from _fact_problems(path, facts, manifest)


def _fact_problems(
    path: Path, facts: Mapping[str, object], manifest: Manifest
) -> Iterator[Problem]:
    """A resume takes these numbers as they are."""
    names = ["step", "samples_seen", "sequence", "seed"]
    if not manifest.names_optimizer and "sequence" not in facts:
        names.remove("sequence")  # which version 1 did not write there
    for name in names:
        found, stated = facts.get(name), getattr(manifest, name, None)
        if name == "seed":
            is_right, rule = _is_seed(found), "it must be a whole number of 64 bits"
        else:
            is_right, rule = type(found) is int and found == stated, f"{MANIFEST} says {stated}"
        if not is_right:
            message = f"= {shown(found)}, but {rule}." if name in facts else "is missing."
            yield Problem(f"{path}: {name}", message)


def _is_seed(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def portion(manifest: Manifest, rank: int, world_size: int) -> list[FileRecord]:
    """The files that `rank` hashes, so that all ranks together hash each once, evenly by bytes."""
    loads = [0] * world_size
    mine: list[FileRecord] = []
    for record in sorted(manifest.files, key=lambda r: (-r.size_bytes, r.path)):
        lightest = loads.index(min(loads))
        loads[lightest] += record.size_bytes
        if lightest == rank:
            mine.append(record)
    return mine


def _problem(folder: StepFolder, record: FileRecord, verify: Verify) -> str | None:
    path = folder.path / record.path
    try:
        if not path.is_file():
            return f"is missing; {record.size_bytes} bytes were committed."
        size_bytes = path.stat().st_size
        if size_bytes != record.size_bytes:
            return f"has {size_bytes} bytes; {record.size_bytes} were committed."
        if verify == "full" and (found := hash_file(path)) != record.checksum:
            return f"has checksum {found}; {record.checksum} was committed."
    except OSError as error:
        return f"cannot be read: {error.strerror}."
    return None
