"""From the path a person types to the weights meant by it, as ranges of bytes. Needs no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint
from parallel_ckpt.formats.dcp import DcpChunk, DcpFolder, DcpTensor, read_dcp
from parallel_ckpt.formats.dcp_item import MalformedItem, find_payload
from parallel_ckpt.formats.dtypes import SAFETENSORS_BY_TORCH
from parallel_ckpt.formats.safetensors import METADATA, read_header, read_index
from parallel_ckpt.layout import (
    DCP,
    DCP_METADATA,
    MANIFEST,
    PRETRAINED_MODEL,
    SAFETENSORS_INDEX,
    TRAINING_STATE,
    StepFolder,
    is_weight_file,
)
from parallel_ckpt.store.contents import Contents
from parallel_ckpt.store.find import resolve_checkpoint
from parallel_ckpt.store.integrity import file_problems
from parallel_ckpt.store.manifest import Manifest
from parallel_config import clean_fqn

_MODEL_ROOTS = ("model", "state_dict")
_OPTIMIZER_ROOTS = ("optimizer", "optim", "optimizers", "state", "param_groups")
_ACCELERATE = "pytorch_model_fsdp_*"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor as it lies in a source file."""

    file: Path
    begin: int
    num_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    crc32: int | None
    """Recorded by the writer; None where the format has none."""
    strides: tuple[int, ...] | None = None
    """In elements; None when they lie in order."""
    first: int = 0


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and the pieces that make it up."""

    dtype: str
    """Named as in safetensors files."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def is_streamable(self) -> bool:
        """Whether each piece is one range of the tensor's bytes: rows of dim 0, in order."""
        return all(
            piece.strides is None and piece.sizes[1:] == self.shape[1:] for piece in self.pieces
        )


@dataclass(frozen=True)
class ConversionSource:
    """Weights to convert."""

    folder: Path
    """Where they lie: a DCP folder, or one of safetensors files."""
    is_dcp: bool
    tensors: Mapping[str, SourceTensor]
    step: StepFolder | None
    """The committed checkpoint that they belong to; None for folders that others wrote."""
    checksums: Mapping[Path, str]
    """By file, as committed; empty for folders that others wrote."""
    companions: tuple[Path, ...]
    """Config, processors and whatever else using the model needs."""
    left_out: tuple[str, ...]
    """Keys that are no weights."""


def find_source(path: str | Path) -> ConversionSource:
    """The weights meant by `path`, checked as far as their metadata goes.

    Understood are everything `resolve_checkpoint` understands, a DCP folder of any writer, the
    folder that accelerate saved into, and a folder of safetensors files.

    Raises:
        CheckpointNotFound: there are none; the message names the paths that could be meant.
        DamagedCheckpoint: something in it contradicts itself or the manifest.
    """
    given = Path(path).expanduser().absolute()
    if given.name.endswith((".distcp", DCP_METADATA)):
        given = given.parent
    step = _committed(given)
    if step is None:
        return _foreign(given)
    if TRAINING_STATE in (given.name, given.parent.name):
        raise CheckpointError.of(
            given, "holds the training state, no weights.", f"Give {step.path}."
        )
    return _of_step(step, wants_dcp=given.name == DCP)


def _committed(given: Path) -> StepFolder | None:
    if given.name == "optimizer" and (given.parent.parent / MANIFEST).is_file():
        return StepFolder(given.parent.parent)
    try:
        return StepFolder(resolve_checkpoint(given))
    except CheckpointNotFound:
        return None


def _of_step(step: StepFolder, *, wants_dcp: bool) -> ConversionSource:
    contents = Contents.read(step)
    is_dcp = contents.has_dcp(step.dcp) and (wants_dcp or not contents.safetensors)
    companions = tuple(sorted(p for p in contents.checksums if _is_companion(step, p)))
    _require_intact(step, contents.manifest, companions)
    folder = step.dcp if is_dcp else step.pretrained_model
    if is_dcp:
        tensors, left_out = _read_dcp(folder)
    else:
        has_index = step.safetensors_index in contents.checksums
        index = step.safetensors_index if has_index else None
        tensors, left_out = _read_safetensors(folder, contents.safetensors, index), ()
    files = {piece.file for tensor in tensors.values() for piece in tensor.pieces}
    contents.require(*sorted(files))
    checksums = {path: contents.checksums[path] for path in files}
    return ConversionSource(folder, is_dcp, tensors, step, checksums, companions, left_out)


def _require_intact(step: StepFolder, manifest: Manifest, companions: Iterable[Path]) -> None:
    """Sizes of all weights; checksums of what is read before the streaming hashes all the rest."""
    small = {*companions, step.dcp / DCP_METADATA, step.safetensors_index}
    weights = [r for r in manifest.files if r.path.startswith(f"{PRETRAINED_MODEL}/")]
    read_first = [r for r in weights if step.path / r.path in small]
    problems = [*file_problems(step, weights, "fast"), *file_problems(step, read_first, "full")]
    if problems:
        raise DamagedCheckpoint(problems[:10], source=str(step.path))


def _foreign(given: Path) -> ConversionSource:
    dcp = [f for f in _dcp_candidates(given) if (f / DCP_METADATA).is_file()]
    if len(dcp) == 1:
        tensors, left_out = _read_dcp(dcp[0])
        config = dcp[0].parent / "config.json"
        companions = (config,) if config.is_file() else ()
        return ConversionSource(dcp[0], True, tensors, None, {}, companions, left_out)
    if given.is_dir() and any(_is_weights(path) for path in given.iterdir()):
        tensors = _read_foreign_safetensors(given)
        others = sorted(p for p in given.iterdir() if p.is_file() and not _is_weights(p))
        return ConversionSource(given, False, tensors, None, {}, tuple(others), ())
    raise CheckpointNotFound.of(given, *_what_is_there(given, dcp))


def _dcp_candidates(given: Path) -> list[Path]:
    if (given / DCP_METADATA).is_file():
        return [given]
    return [*sorted(given.glob(_ACCELERATE)), given / DCP, given / PRETRAINED_MODEL / DCP]


def _what_is_there(given: Path, dcp: list[Path]) -> tuple[str, str]:
    if not given.is_dir():
        return "does not exist.", "Give a checkpoint, a run folder or a DCP folder."
    if len(dcp) > 1:
        return f"holds {len(dcp)} DCP folders.", f"Give one: {', '.join(map(str, dcp))}."
    shards = sorted(given.glob("*.distcp"))
    if shards:
        return (
            f"holds {len(shards)} *.distcp but no {DCP_METADATA}, which is written last: the save "
            "did not finish, or the file was not copied along.",
            f"Copy {DCP_METADATA} (its name starts with a dot) from where the save was made.",
        )
    below = sorted(path.parent for path in given.glob(f"*/{DCP_METADATA}"))
    hint = f"Give one of: {', '.join(map(str, below[:3]))}." if below else ""
    return "holds no weights: no manifest.json, dcp, pytorch_model_fsdp_* or *.safetensors.", hint


def _is_weights(path: Path) -> bool:
    return path.name == SAFETENSORS_INDEX or is_weight_file(path.name)


def _is_companion(step: StepFolder, path: Path) -> bool:
    return (
        path.is_relative_to(step.pretrained_model)
        and not path.is_relative_to(step.dcp)
        and not (path.parent == step.pretrained_model and _is_weights(path))
    )


def _read_foreign_safetensors(folder: Path) -> dict[str, SourceTensor]:
    """Those that the index names, else all."""
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        files = [folder / name for name in sorted(set(read_index(index).values()))]
        return _read_safetensors(folder, files, index)
    files = sorted(path for path in folder.iterdir() if is_weight_file(path.name))
    return _read_safetensors(folder, files, None)


def _read_safetensors(
    folder: Path, files: Sequence[Path], index: Path | None
) -> dict[str, SourceTensor]:
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        _require_inside(file, folder)
        for name, entry in read_header(file).tensors.items():
            if name in tensors:
                raise DamagedCheckpoint.of(file, f"holds {name[:200]!r}, as another file does.")
            zeros = (0,) * len(entry.shape)
            piece = Piece(file, entry.begin, entry.num_bytes, zeros, entry.shape, None)
            pieces = (piece,) if entry.num_bytes else ()
            tensors[name] = SourceTensor(entry.dtype, entry.shape, pieces)
    if index is not None and read_index(index).keys() != tensors.keys():
        odd = sorted(read_index(index).keys() ^ tensors.keys())
        raise DamagedCheckpoint.of(index, f"and its files differ in tensors: {odd[:3]}.")
    return tensors


def _read_dcp(folder: Path) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    stored = read_dcp(folder)
    weights = _select_weights(stored)
    with _open_files(folder, stored.files) as descriptors:
        tensors = {
            name: _source_tensor(folder, name, tensor, descriptors)
            for name, tensor in weights.items()
        }
    used = {id(tensor) for tensor in weights.values()}
    others = (key for key, tensor in stored.tensors.items() if id(tensor) not in used)
    return tensors, (*others, *stored.objects)


def _select_weights(stored: DcpFolder) -> dict[str, DcpTensor]:
    """The model's tensors by FQN, out of whatever else was saved beside them."""
    nested = {key: t for key, t in stored.tensors.items() if len(t.path) > 1}
    if nested:
        found = [(_below_model(t.path), t) for t in nested.values()]
        named = [(name, t) for name, t in found if name]
    else:
        named = list(stored.tensors.items())
        if all(key.split(".")[0] in _OPTIMIZER_ROOTS for key in stored.tensors):
            named = []
    if not named:
        roots = sorted({t.path[0].split(".")[0] for t in stored.tensors.values()})
        what = "optimizer state" if set(roots) & set(_OPTIMIZER_ROOTS) else f"{roots[:5]}"
        raise CheckpointError.of(
            stored.folder,
            f"holds {what}, no weights: they are looked for under 'model' or by plain names.",
            "Give the folder of the model (accelerate: pytorch_model_fsdp_0).",
        )
    under_ddp = all(name.startswith("module.") for name, _ in named)
    weights = {clean_fqn(name, under_ddp=under_ddp): tensor for name, tensor in named}
    if len(weights) != len(named) or METADATA in weights:
        raise DamagedCheckpoint.of(stored.folder, "holds two tensors of one parameter's name.")
    return weights


def _below_model(path: tuple[str, ...]) -> str:
    for at, part in enumerate(path[:-1]):
        if part in _MODEL_ROOTS:
            return ".".join(path[at + 1 :])
        if part in _OPTIMIZER_ROOTS:
            break
    return ""


def _source_tensor(
    folder: Path, name: str, tensor: DcpTensor, descriptors: Mapping[str, int]
) -> SourceTensor:
    dtype = SAFETENSORS_BY_TORCH.get(tensor.dtype)
    if dtype is None:
        raise CheckpointError.of(
            name, f"has dtype {tensor.dtype}, which safetensors files cannot hold."
        )
    pieces = [
        _piece(folder, name, tensor.dtype, chunk, descriptors[chunk.file])
        for chunk in tensor.chunks
    ]
    return SourceTensor(dtype, tensor.shape, tuple(pieces))


def _piece(folder: Path, name: str, dtype: str, chunk: DcpChunk, descriptor: int) -> Piece:
    path = folder / chunk.file
    try:
        found = find_payload(descriptor, chunk, dtype)
    except MalformedItem as error:
        raise DamagedCheckpoint.of(path, f"at {name[:200]}: {error}.") from error
    strides = None if math.prod(chunk.sizes) == 1 and not found.first else found.strides
    return Piece(
        path,
        found.begin,
        found.num_bytes,
        chunk.offsets,
        chunk.sizes,
        found.crc32,
        strides,
        found.first,
    )


@contextmanager
def _open_files(folder: Path, names: list[str]) -> Iterator[dict[str, int]]:
    descriptors: dict[str, int] = {}
    try:
        for name in names:
            _require_inside(folder / name, folder)
            descriptors[name] = os.open(folder / name, os.O_RDONLY)
        yield descriptors
    except FileNotFoundError as error:
        raise DamagedCheckpoint.of(
            error.filename, f"is missing; {DCP_METADATA} names it."
        ) from error
    except OSError as error:
        raise DamagedCheckpoint.of(folder, f"cannot be read: {error}.") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _require_inside(path: Path, folder: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DamagedCheckpoint.of(
            path, "is a link out of its folder.", "Copy the folder with links followed."
        )
    if path.exists() and not path.is_file():
        raise DamagedCheckpoint.of(path, "is no regular file.")
