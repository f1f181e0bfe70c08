"""The manifest: what a checkpoint is, and every file of it with size and checksum."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any

from parallel_ckpt.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint
from parallel_ckpt.formats.checked_json import is_count, parse_json
from parallel_ckpt.formats.hashing import HASH_NAME, hash_bytes
from parallel_ckpt.formats.hashing import FileRecord as FileRecord
from parallel_ckpt.layout import StepFolder
from parallel_config import CheckpointFormat, Problem, Topology

FORMAT_VERSION = 2
"""Of the on-disk layout; raised when a reader of the former one could no longer follow."""
_UNCHECKED_VERSION = 1
"""Its manifests carry no checksum of their own, and say less; they are still read."""
_OWN_CHECKSUM = "manifest_checksum"
MAX_MANIFEST_BYTES = 64 << 20
"""A larger manifest is refused unread: it is not one of ours."""
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """The optimizer whose state a checkpoint holds."""

    class_name: str
    """Dotted path of its class, without what wraps it: `torch.optim.adamw.AdamW`."""


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model that a checkpoint's weights are to be added to."""

    source: str
    """Where it came from: a folder, or a repository."""
    revision: str | None
    """The commit of a repository."""
    weights_hash: str
    """Of its weights, as lower-case hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a committed checkpoint holds and where it came from."""

    step: int
    """Optimizer updates done."""
    samples_seen: int
    """Real samples consumed by those updates, over all ranks."""
    sequence: int
    """Counts the commits of a run: the newest checkpoint is not the one of the highest step when a
    run was taken up again from an earlier one."""
    topology: Topology
    """Degrees of the run that wrote it."""
    checkpoint_format: CheckpointFormat
    files: tuple[FileRecord, ...]
    """Every file but the manifest, sorted by path."""
    format_version: int = FORMAT_VERSION
    hash_name: str = HASH_NAME
    created_at: str = ""
    """UTC, ISO 8601."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python and of the packages that wrote it."""
    provenance: Mapping[str, object] = field(default_factory=dict)
    """What the writer wanted remembered: declared degrees, environment that won over the config."""
    ring_degree: int = 1
    """Ranks that pass the keys and values of one sequence around."""
    ulysses_degree: int = 1
    """Ranks that divide the heads of one sequence."""
    optimizer: OptimizerRecord | None = None
    """None where no optimizer was saved, and in format_version 1, which does not name its class."""
    base_model: BaseModel | None = None
    """None where the weights are whole by themselves."""
    parent: int | None = None
    """`sequence` of the checkpoint that the run went on from; None for the first one, and in
    format_version 1."""

    @property
    def names_optimizer(self) -> bool:
        """Whether `optimizer` says what was saved: format_version 1 does not."""
        return self.format_version > _UNCHECKED_VERSION

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.size_bytes for record in self.files)

    def to_json(self) -> str:
        """The text that is stored, with its own checksum in it."""
        return signed_text(self._document())

    def _document(self) -> dict[str, Any]:
        document = asdict(self) | {"files": [asdict(record) for record in self.files]}
        degrees = {name: document.pop(name) for name in ("ring_degree", "ulysses_degree")}
        if not self.names_optimizer:
            return {name: value for name, value in document.items() if name not in _SINCE_2}
        optimizer = None if self.optimizer is None else {"class": self.optimizer.class_name}
        return document | {"topology": document["topology"] | degrees, "optimizer": optimizer}


def signed_text(document: Mapping[str, Any]) -> str:
    """The text of a manifest's document; its own checksum is computed anew."""
    # Through JSON once: what that turns into other values must be turned before it is hashed.
    plain = json.loads(json.dumps(document))
    plain.pop(_OWN_CHECKSUM, None)
    text = _canonical(plain)
    if plain.get("format_version") == _UNCHECKED_VERSION:
        return text
    checksum = hash_bytes(text.encode())
    return _canonical(plain | {_OWN_CHECKSUM: checksum})


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _checksum_line(checksum: str) -> str:
    """How the canonical text holds it: without this line it is the text that was hashed."""
    return f'\n  "{_OWN_CHECKSUM}": "{checksum}",'


def read_manifest(folder: StepFolder) -> Manifest:
    """Read and check the manifest of a checkpoint; nothing in it can name a file outside.

    Raises:
        CheckpointNotFound: the folder has no manifest, so it is not a checkpoint.
        DamagedCheckpoint: the file is not a manifest; the message names the field.
    """
    path = folder.manifest
    if not path.is_file():
        raise CheckpointNotFound.of(
            folder.path,
            f"does not contain {path.name}, so a checkpoint was never committed there.",
            "Give a step folder of a run, the run folder, or its checkpoints/last.",
        )
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise DamagedCheckpoint.of(path, f"has more than {MAX_MANIFEST_BYTES} bytes.")
    return _parsed(path.read_bytes(), path)


@lru_cache(maxsize=8)
def _parsed(text: bytes, path: Path) -> Manifest:
    """A resume asks for one manifest several times: which is newest, is it whole, what is in it.

    The bytes are the key, so that a manifest that was replaced is parsed anew.
    """
    return parse_manifest(text, path)


def sequence_of(folder: StepFolder) -> int | None:
    """When a checkpoint was committed, counted in commits; None where that cannot be read."""
    try:
        return read_manifest(folder).sequence
    except CheckpointError:
        return None


def parse_manifest(text: bytes | str, source: Path) -> Manifest:
    """Build a manifest from its text.

    Raises:
        DamagedCheckpoint: names each wrong field; `source` is what the message calls the document.
    """
    document = parse_json(text, source)
    version = document.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise DamagedCheckpoint.of(
            source,
            f"format_version = {version}, but this parallel-ckpt reads up to {FORMAT_VERSION}.",
            "Upgrade parallel-ckpt.",
        )
    problems = list(_problems(document))
    if problems:
        raise DamagedCheckpoint(problems[:10], source=str(source))
    if version != _UNCHECKED_VERSION:
        _require_own_text(text, document[_OWN_CHECKSUM], source)
    return _build(document)


def _require_own_text(text: bytes | str, stated: str, source: Path) -> None:
    """Raise unless the bytes are those that were written: no changed bit passes.

    The bytes are hashed, not the values: many texts have the same values (spaces, escapes).
    """
    data = text.encode() if isinstance(text, str) else text
    line = _checksum_line(stated).encode()
    if line not in data:
        raise DamagedCheckpoint.of(
            source,
            f"does not hold its {_OWN_CHECKSUM} in the form that is written: it was changed.",
        )
    if (own := hash_bytes(data.replace(line, b"", 1))) != stated:
        raise DamagedCheckpoint.of(
            source,
            f"has checksum {own}, but its {_OWN_CHECKSUM} is {stated}: it was changed or damaged.",
        )


def is_safe_path(path: str) -> bool:
    """Whether a stored relative path stays below the folder it is relative to."""
    parts = PurePosixPath(path).parts
    return (
        bool(parts)
        and path == "/".join(parts)
        and not path.startswith("/")
        and not any(part in ("..", ".") for part in parts)
        and not any(char in path for char in "\\:\0")
    )


def _build(document: Mapping[str, Any]) -> Manifest:
    topology = dict(document["topology"])
    degrees = {name: topology.pop(name) for name in _CONTEXT_DEGREES if name in topology}
    optimizer, base = document.get("optimizer"), document.get("base_model")
    return Manifest(
        step=document["step"],
        samples_seen=document["samples_seen"],
        sequence=document["sequence"],
        topology=Topology(**topology),
        checkpoint_format=CheckpointFormat(document["checkpoint_format"]),
        files=tuple(FileRecord(**record) for record in document["files"]),
        format_version=document["format_version"],
        hash_name=document["hash_name"],
        created_at=document["created_at"],
        versions=document["versions"],
        provenance=document["provenance"],
        optimizer=None if optimizer is None else OptimizerRecord(class_name=optimizer["class"]),
        base_model=None if base is None else BaseModel(**base),
        parent=document.get("parent"),
        **degrees,
    )


_CONTEXT_DEGREES = ("ring_degree", "ulysses_degree")
_SINCE_2 = ("optimizer", "base_model", "parent")


def _problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    is_first = document.get("format_version") == _UNCHECKED_VERSION
    known = {"topology", "files", "versions", "provenance", *_SCALARS}
    known |= set() if is_first else {*_SINCE_2, _OWN_CHECKSUM}
    for name in sorted(known - document.keys()):
        yield Problem(name, "is missing.")
    for name in sorted(document.keys() - known):
        yield Problem(name, "is unknown to this format_version.")
    if known != document.keys():
        return
    for name, (rule, is_right) in _SCALARS.items():
        if not is_right(document[name]):
            yield Problem(name, f"= {_show(document[name])}, but it must be {rule}.")
    yield from _topology_problems(document["topology"], () if is_first else _CONTEXT_DEGREES)
    for name in ("versions", "provenance"):
        if not isinstance(document[name], dict):
            yield Problem(name, "is not a JSON object.")
    if not is_first:
        yield from _later_problems(document)
    yield from _file_problems(document["files"])


def _later_problems(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Of the fields that format_version 2 has brought."""
    optimizer, base, parent = (document[name] for name in _SINCE_2)
    if optimizer is not None and not _is_record(optimizer, {"class": str}):
        yield Problem("optimizer", f"= {_show(optimizer)}, but it must be null or name a class.")
    rule: dict[str, type | UnionType] = {
        "source": str,
        "revision": str | None,
        "weights_hash": str,
    }
    if base is not None and not _is_record(base, rule):
        yield Problem(
            "base_model",
            f"= {_show(base)}, but it must be null or have source, revision and weights_hash.",
        )
    sequence, own = document["sequence"], document[_OWN_CHECKSUM]
    if parent is not None and not (is_count(parent) and is_count(sequence) and parent < sequence):
        yield Problem("parent", f"= {_show(parent)}, but it must be null or below sequence.")
    if not isinstance(own, str) or not _CHECKSUM.fullmatch(own):
        yield Problem(_OWN_CHECKSUM, f"= {_show(own)} is not an {HASH_NAME} digest.")


def _is_record(value: object, types: Mapping[str, type | UnionType]) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == types.keys()
        and all(isinstance(value[name], kind) for name, kind in types.items())
    )


_SCALARS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "format_version": (
        f"from {_UNCHECKED_VERSION} to {FORMAT_VERSION}",
        lambda value: type(value) is int and _UNCHECKED_VERSION <= value <= FORMAT_VERSION,
    ),
    "step": ("a count", is_count),
    "samples_seen": ("a count", is_count),
    "sequence": ("a count", is_count),
    "checkpoint_format": (
        "one of " + ", ".join(CheckpointFormat),
        lambda value: isinstance(value, str) and value in set(CheckpointFormat),
    ),
    "hash_name": (HASH_NAME, lambda value: value == HASH_NAME),
    "created_at": ("a time", lambda value: isinstance(value, str)),
}


def _topology_problems(topology: object, context: Sequence[str]) -> Iterator[Problem]:
    names = {"dp_replicate", "dp_shard", *context}
    if not isinstance(topology, dict) or topology.keys() != names:
        *most, last = sorted(names)
        yield Problem("topology", f"must contain {', '.join(most)} and {last} and nothing else.")
        return
    for name in sorted(names):
        if not is_count(topology[name]) or topology[name] < 1:
            yield Problem(
                f"topology.{name}", f"= {_show(topology[name])}, but it must be at least 1."
            )


def _file_problems(files: object) -> Iterator[Problem]:
    if not isinstance(files, list):
        yield Problem("files", "is not a list.")
        return
    seen: set[str] = set()
    for index, record in enumerate(files):
        where = f"files[{index}]"
        names = {"path", "size_bytes", "checksum"}
        if not isinstance(record, dict) or record.keys() != names:
            yield Problem(where, "must contain path, size_bytes and checksum and nothing else.")
            continue
        path, checksum = record["path"], record["checksum"]
        if not isinstance(path, str) or not is_safe_path(path):
            yield Problem(f"{where}.path", f"= {_show(path)}, but it must stay in the checkpoint.")
        elif path in seen:
            yield Problem(f"{where}.path", f"= {_show(path)} is listed twice.")
        else:
            seen.add(path)
        if not is_count(record["size_bytes"]):
            yield Problem(f"{where}.size_bytes", f"= {_show(record['size_bytes'])} is not a count.")
        if not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
            yield Problem(f"{where}.checksum", f"= {_show(checksum)} is not an {HASH_NAME} digest.")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
