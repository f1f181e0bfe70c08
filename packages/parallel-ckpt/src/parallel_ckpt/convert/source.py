"""From the path a person types to the weights meant by it, as ranges of bytes, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from parallel_ckpt.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint
from parallel_ckpt.formats.dcp import DcpFolder, read_dcp
from parallel_ckpt.formats.dtypes import SAFETENSORS_BY_TORCH
from parallel_ckpt.formats.hashing import FileRecord
from parallel_ckpt.formats.limits import METADATA
from parallel_ckpt.formats.safetensors import read_tensors
from parallel_ckpt.formats.stored import StoredTensor
from parallel_ckpt.formats.tensor_files import OpenFiles, safetensors_in
from parallel_ckpt.layout import (
    DCP,
    DCP_INDEX,
    DCP_METADATA,
    MANIFEST,
    PRETRAINED_MODEL,
    TRAINING_STATE,
    StepFolder,
    belongs_to_weights,
)
from parallel_ckpt.store.contents import Contents
from parallel_ckpt.store.find import resolve_checkpoint
from parallel_ckpt.store.integrity import file_problems
from parallel_ckpt.store.manifest import Manifest
from parallel_config import clean_fqn

_MODEL_ROOTS = ("model", "state_dict")
_OPTIMIZER_ROOTS = ("optimizer", "optim", "optimizers", "state", "param_groups")
_ACCELERATE = "pytorch_model_fsdp_*"


@dataclass(frozen=True)
class ConversionSource:
    """Weights to convert."""

    folder: Path
    """Where they lie: a DCP folder, or one of safetensors files."""
    is_dcp: bool
    tensors: Mapping[str, StoredTensor]
    """By name; none of their pieces is in an archive any more."""
    step: StepFolder | None
    """The committed checkpoint that they belong to; None for folders that others wrote."""
    records: Mapping[Path, FileRecord]
    """By file, as committed; empty for folders that others wrote."""
    companions: tuple[Path, ...]
    """Config, processors and whatever else using the model needs."""
    left_out: tuple[str, ...]
    """Keys of the source that are not weights."""


def find_source(path: str | Path) -> ConversionSource:
    """The weights meant by `path`, checked as far as their metadata goes.

    Understood are everything `resolve_checkpoint` understands, a DCP folder of any writer, the
    folder that accelerate saved into, and a folder of safetensors files.

    Raises:
        CheckpointNotFound: there are not any; the message names the paths that could be meant.
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
            given, "holds the training state, not weights.", f"Give {step.path}."
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
    companions = tuple(sorted(p for p in contents.records if _is_companion(step, p)))
    _require_intact(step, contents.manifest, companions)
    if is_dcp:
        folder = step.dcp
        stored = contents.read_dcp(folder)
        # What was saved here says its names; there is nothing to guess.
        tensors, left_out = _weights_in(stored, {key: key for key in stored.tensors})
    else:
        folder = step.pretrained_model
        tensors, left_out = contents.read_safetensors(), ()
    files = {piece.file for tensor in tensors.values() for piece in tensor.pieces}
    records = {path: contents.records[path] for path in files}
    return ConversionSource(folder, is_dcp, tensors, step, records, companions, left_out)


def _require_intact(step: StepFolder, manifest: Manifest, companions: Iterable[Path]) -> None:
    """Sizes of all weights; checksums of what is read before the streaming hashes all the rest."""
    documents = {step.dcp / DCP_METADATA, step.dcp / DCP_INDEX, step.safetensors_index}
    small = {*companions, *documents}
    weights = [r for r in manifest.files if r.path.startswith(f"{PRETRAINED_MODEL}/")]
    read_first = [r for r in weights if step.path / r.path in small]
    problems = [*file_problems(step, weights, "fast"), *file_problems(step, read_first, "full")]
    if problems:
        raise DamagedCheckpoint(problems[:10], source=str(step.path))


def _foreign(given: Path) -> ConversionSource:
    dcp = [f for f in _dcp_candidates(given) if (f / DCP_METADATA).is_file()]
    if len(dcp) == 1:
        stored = read_dcp(dcp[0])
        _require_inside(stored.files, dcp[0])
        tensors, left_out = _weights_in(stored, _select_weights(stored))
        config = dcp[0].parent / "config.json"
        companions = (config,) if config.is_file() else ()
        return ConversionSource(dcp[0], True, tensors, None, {}, companions, left_out)
    files, index = safetensors_in(given) if given.is_dir() else ([], None)
    if files:
        _require_inside(files, given)
        tensors = read_tensors(files, index)
        kept = (path for path in given.iterdir() if path not in files)
        others = sorted(p for p in kept if p.is_file() and not belongs_to_weights(p.name))
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
            f"holds {len(shards)} *.distcp but not {DCP_METADATA}, which is written last: the save "
            "did not finish, or the file was not copied along.",
            f"Copy {DCP_METADATA} (its name starts with a dot) from where the save was made.",
        )
    below = sorted(path.parent for path in given.glob(f"*/{DCP_METADATA}"))
    hint = f"Give one of: {', '.join(map(str, below[:3]))}." if below else ""
    return (
        "does not hold weights: neither manifest.json, dcp, pytorch_model_fsdp_* nor "
        "model.safetensors or its parts.",
        hint,
    )


def _is_companion(step: StepFolder, path: Path) -> bool:
    return (
        path.is_relative_to(step.pretrained_model)
        and not path.is_relative_to(step.dcp)
        and not (path.parent == step.pretrained_model and belongs_to_weights(path.name))
    )


def _weights_in(
    stored: DcpFolder, keys: Mapping[str, str]
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The model's tensors by FQN, out of their archives, and the keys of everything else.

    `keys` are those of the model's tensors by FQN.
    """
    with closing(OpenFiles()) as files:
        tensors = {name: _located(name, stored.tensors[key], files) for name, key in keys.items()}
    used = set(keys.values())
    return tensors, (*(key for key in stored.tensors if key not in used), *stored.objects)


def _located(name: str, tensor: StoredTensor, files: OpenFiles) -> StoredTensor:
    if tensor.dtype not in SAFETENSORS_BY_TORCH:
        raise CheckpointError.of(
            name, f"has dtype {tensor.dtype}, which safetensors files cannot hold."
        )
    pieces = []
    for piece in tensor.pieces:
        with files.located(name, piece, tensor.dtype) as (_, found):
            pieces.append(found)
    return replace(tensor, pieces=tuple(pieces))


def _select_weights(stored: DcpFolder) -> dict[str, str]:
    """The key of each of the model's tensors by FQN, out of whatever another writer saved there.

    The model lies under a key of its own, or its tensors stand on top: alone, or (torchtitan)
    beside an optimizer, which is nested then.
    """
    found = [(_below_model(path), key) for key, path in stored.paths.items() if len(path) > 1]
    named = [(name, key) for name, key in found if name]
    if not named:
        on_top = [key for key, path in stored.paths.items() if len(path) == 1]
        if not all(key.split(".")[0] in _OPTIMIZER_ROOTS for key in on_top):
            named = [(key, key) for key in on_top]
    if not named:
        roots = sorted({path[0].split(".")[0] for path in stored.paths.values()})
        what = "optimizer state" if set(roots) & set(_OPTIMIZER_ROOTS) else f"{roots[:5]}"
        raise CheckpointError.of(
            stored.folder,
            f"holds {what}, not weights: weights must lie under 'model' or have plain names.",
            "Give the folder of the model (accelerate: pytorch_model_fsdp_0).",
        )
    # A model that was saved inside of DDP has this part in every name, and only then it goes.
    under_ddp = all(name.startswith("module.") for name, _ in named)
    weights = {clean_fqn(name, under_ddp=under_ddp): key for name, key in named}
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


def _require_inside(files: Iterable[Path], folder: Path) -> None:
    """Another writer's folder may be a trap: a link would copy a file of ours into the result, and
    a pipe would make us wait for ever.
    """
    for path in files:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DamagedCheckpoint.of(
                path,
                "is a link that leads out of its folder.",
                "Copy the folder with links followed.",
            )
        if path.exists() and not path.is_file():
            raise DamagedCheckpoint.of(path, "is not a regular file.")
