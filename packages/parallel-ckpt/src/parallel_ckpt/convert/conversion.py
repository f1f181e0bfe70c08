"""`ptrain convert`: weights to safetensors files, offline, in one process, in a few megabytes.

It does not use torch or a process group, and it does not read a launcher's variables. Everything is
written under a hidden name, re-opened and compared, and only then renamed. The source is whole at
every moment; its shards are removed after that, if the caller asks for it.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from parallel_ckpt.convert.cast import Dtype
from parallel_ckpt.convert.plan import OutputFile, index_of, plan_files
from parallel_ckpt.convert.result import ConvertResult
from parallel_ckpt.convert.source import ConversionSource, find_source
from parallel_ckpt.convert.stream import Tick, read_back, write_files
from parallel_ckpt.errors import CheckpointError, DamagedCheckpoint
from parallel_ckpt.formats.dcp import read_dcp
from parallel_ckpt.formats.dtypes import SAFETENSORS_BY_TORCH
from parallel_ckpt.formats.hashing import FileRecord, hash_file, hashed_file
from parallel_ckpt.formats.limits import shown
from parallel_ckpt.layout import (
    CONVERTING,
    DCP_INDEX,
    DCP_METADATA,
    MANIFEST,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    StepFolder,
)
from parallel_ckpt.store.commit import flush_folder, make_folder
from parallel_ckpt.store.contents import Contents
from parallel_ckpt.store.integrity import file_problems
from parallel_ckpt.store.manifest import Manifest, read_manifest
from parallel_ckpt.store.workspace import clear, temporary_folder
from parallel_config import CheckpointFormat, ConfigError, Problem
from parallel_config.checkpoint import parse_size

Progress = Callable[[int, int], None]
"""Is called with the bytes done and the bytes in all."""
_CONFIG = "config.json"
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert(
    source: str | Path,
    output: str | Path | None = None,
    dtype: Dtype = "keep",
    max_shard_size: str | int = "5GB",
    delete_dcp: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write the weights of a checkpoint as safetensors files. No collective.

    `source` is a step folder, its `pretrained_model` or `dcp`, a run folder, `last`, or a DCP
    folder that plain torch or accelerate wrote. Without `output`, `model.safetensors` is put beside
    the shards and into the manifest (a folder of another writer: into `<name>_safetensors`
    beside it). With `output`, a new folder gets the weights, config and processors. `delete_dcp`
    removes the shards after the result was read back and compared.

    Raises:
        ConfigError: an argument is wrong, or asks for something that would lose data.
        CheckpointError: there are no weights, they are damaged, or the disk is too small. Nothing
            is left under the final name.
    """
    if dtype not in get_args(Dtype):
        raise ConfigError(Problem("dtype", f"= {dtype!r} is not one of {get_args(Dtype)}."))
    try:
        limit = parse_size(max_shard_size)
    except ValueError as error:
        raise ConfigError(Problem("max_shard_size", f"= {error}")) from error
    found = find_source(source)
    if delete_dcp and output is None and dtype == "keep":
        _forget_second_copy(found)
        if left := _left_shards(found):
            return _finish_deletion(found, left)
    target = _target(found, output)
    files = plan_files(found.tensors, dtype, limit)
    _refuse_loss(found, files, target, dtype, delete_dcp)
    try:
        cleared = clear(*_workspace(found, target))
        if target is None and found.step is not None:
            deleted = _convert_in_place(found, found.step, files, delete_dcp, progress)
        else:
            assert target is not None
            _convert_to(found, target, files, dtype, progress)
            deleted = _delete_shards(found) if delete_dcp else ()
    except OSError as error:
        where = error.filename or found.folder
        raise CheckpointError.of(where, f"stopped the conversion: {error.strerror}.") from error
    folder = target or found.step.pretrained_model if found.step else target
    assert folder is not None
    return _result(found, folder, files, deleted, cleared)


def _target(source: ConversionSource, output: str | Path | None) -> Path | None:
    """The folder that will be made; None means beside the shards of a checkpoint of ours."""
    if output is not None:
        return Path(output).expanduser().absolute()
    if source.step is not None:
        return None
    if source.is_dcp:
        return source.folder.with_name(f"{source.folder.name}_safetensors")
    raise ConfigError(
        Problem("output", "is missing: the weights are safetensors already.", "Use --output DIR.")
    )


def _workspace(source: ConversionSource, target: Path | None) -> tuple[Path, str]:
    """Where the result is put together: the folder, and how names in it begin."""
    if target is not None:
        return target.parent, f".{target.name}{CONVERTING}"
    assert source.step is not None
    return source.step.pretrained_model, CONVERTING


def _refuse_loss(
    source: ConversionSource,
    files: Sequence[OutputFile],
    target: Path | None,
    dtype: Dtype,
    delete_dcp: bool,
) -> None:
    problems: list[Problem] = []
    changes = any(t.dtype != t.stored_dtype for file in files for t in file.tensors)
    if delete_dcp and changes:
        problems.append(
            Problem("dtype", f"= {dtype} with --delete_dcp would lose the original values.")
        )
    if delete_dcp and not source.is_dcp:
        problems.append(Problem("delete_dcp", f"has nothing to remove in {source.folder}."))
    if delete_dcp and source.left_out:
        lost = f"what is not weights: {shown(source.left_out[0])}"
        lost += f" and {len(source.left_out) - 1} more" * (len(source.left_out) > 1)
        problems.append(Problem("delete_dcp", f"would also remove {lost}.", "Leave it out."))
    if target is not None:
        problems += _target_problems(source, target, delete_dcp)
    else:
        problems += _in_place_problems(source, files, changes)
    if problems:
        raise ConfigError(problems)


def _target_problems(source: ConversionSource, target: Path, delete_dcp: bool) -> Iterator[Problem]:
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        yield Problem("output", f"= {target} exists and is not empty.", "Give a new folder.")
    if delete_dcp and source.step is not None:
        yield Problem(
            "delete_dcp",
            f"with --output would leave {source.step.path} without files that its manifest lists.",
            "Leave out --output, or delete the checkpoint as a whole.",
        )
    if target.is_relative_to(source.folder) or (
        source.step and target.is_relative_to(source.step.path)
    ):
        yield Problem("output", f"= {target} lies in the checkpoint itself.", "Give another.")


def _in_place_problems(
    source: ConversionSource, files: Sequence[OutputFile], changes: bool
) -> Iterator[Problem]:
    if not source.is_dcp or (source.step and Contents.read(source.step).safetensors):
        where = source.step.pretrained_model if source.step else source.folder
        yield Problem("output", f"is missing: {where} holds safetensors already.", "Give --output.")
    if changes:
        yield Problem(
            "output", "is missing: a resume needs the weights in the dtype they have.", "Give it."
        )
    if len(files) > 1:
        size = sum(file.size_bytes for file in files)
        yield Problem(
            "max_shard_size",
            f"makes {len(files)} files. Several files cannot be added to the checkpoint "
            "atomically.",
            f"Give --output, or --max_shard_size {-(-size // 10**9)}GB.",
        )


def _convert_to(
    source: ConversionSource,
    target: Path,
    files: Sequence[OutputFile],
    dtype: Dtype,
    progress: Progress | None,
) -> None:
    """A new folder with everything that using the model needs, by one rename."""
    make_folder(target.parent)
    with temporary_folder(*_workspace(source, target)) as temporary:
        _write_checked(source, temporary, files, progress)
        if len(files) > 1:
            with hashed_file(temporary / SAFETENSORS_INDEX) as file:
                file.write(index_of(files))
        for companion in source.companions:
            _copy(companion, temporary / _relative(source, companion), source, dtype)
        for path, _, _ in os.walk(temporary, topdown=False):
            flush_folder(Path(path))
        os.replace(temporary, target)
        try:
            flush_folder(target.parent)
        except OSError:
            os.replace(target, temporary)  # which is removed now
            raise


def _convert_in_place(
    source: ConversionSource,
    step: StepFolder,
    files: Sequence[OutputFile],
    delete_dcp: bool,
    progress: Progress | None,
) -> tuple[Path, ...]:
    """Beside the shards: the file by one rename, then the manifest by another, then deletion.

    Killed in between, there is a file that the manifest does not know, or shards that it no longer
    knows. Nothing reads those, and a further conversion replaces or removes them.
    """
    with temporary_folder(*_workspace(source, None)) as temporary:
        (record,) = _write_checked(source, temporary, files, progress)
        os.replace(temporary / SAFETENSORS, step.safetensors)
        flush_folder(step.pretrained_model)
        path = step.safetensors.relative_to(step.path).as_posix()
        manifest = _with_weights(source, step, replace(record, path=path), delete_dcp)
        with hashed_file(temporary / MANIFEST) as file:
            file.write(manifest.to_json().encode())
        os.replace(temporary / MANIFEST, step.manifest)
        flush_folder(step.path)
    return _delete_shards(source) if delete_dcp else ()


def _with_weights(
    source: ConversionSource, step: StepFolder, weights: FileRecord, delete_dcp: bool
) -> Manifest:
    """The manifest with one more file, and without the shards where they are to go."""
    manifest = read_manifest(step)
    shards = {path.relative_to(step.path).as_posix() for path in _shard_files(source)}
    gone = shards if delete_dcp else set()
    files = [weights, *(known for known in manifest.files if known.path not in gone)]
    return replace(
        manifest,
        files=tuple(sorted(files, key=lambda known: known.path)),
        checkpoint_format=CheckpointFormat.SAFETENSORS
        if delete_dcp
        else CheckpointFormat.SAFETENSORS_DCP,
    )


def _write_checked(
    source: ConversionSource, folder: Path, files: Sequence[OutputFile], progress: Progress | None
) -> list[FileRecord]:
    """Write, flush, re-open and compare; a record of each file."""
    pieces = [piece for tensor in source.tensors.values() for piece in tensor.pieces]
    read = sum(piece.num_bytes for piece in pieces)
    tick = _ticker(read + sum(t.num_bytes for file in files for t in file.tensors), progress)
    written = write_files(folder, files, source.records, tick)
    return read_back(folder, files, written, tick)


def _ticker(total: int, progress: Progress | None) -> Tick:
    done, lock = 0, threading.Lock()

    def tick(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            if progress is not None:
                progress(done, total)

    return tick


def _relative(source: ConversionSource, companion: Path) -> Path:
    root = source.step.pretrained_model if source.step else companion.parent
    return companion.relative_to(root)


def _copy(path: Path, target: Path, source: ConversionSource, dtype: Dtype) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.name == _CONFIG and dtype != "keep" and (text := _with_dtype(path, dtype)):
        with hashed_file(target) as file:
            file.write(text)
        return
    with path.open("rb") as reader, hashed_file(target) as file:
        while block := reader.read(1 << 20):
            file.write(block)
    if hash_file(target) != hash_file(path):
        raise CheckpointError.of(target, "reads back differently from what was written.")


def _with_dtype(path: Path, dtype: Dtype) -> bytes | None:
    """A model's config that names the new dtype; None when it does not name a dtype."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError:
        return None
    names = [n for n in ("dtype", "torch_dtype") if isinstance(config, dict) and n in config]
    if not names:
        return None
    changed = config | dict.fromkeys(names, _TORCH_NAMES[dtype])
    return (json.dumps(changed, indent=2) + "\n").encode()


def _shard_files(source: ConversionSource) -> list[Path]:
    """Files of the DCP folder, the one that makes it readable last."""
    named = [*read_dcp(source.folder).files, source.folder / DCP_METADATA]
    # In a checkpoint of ours all shards go, in another writer's folder those that were converted.
    ours = _our_shards(source.folder) if source.step is not None else []
    return list(dict.fromkeys([*ours, *named]))


def _forget_second_copy(source: ConversionSource) -> None:
    """Of weights that one save kept as safetensors and as DCP, take the DCP out of the manifest.

    Its files are then as those of `_left_shards`. The safetensors files are read whole first: they
    are the only copy from here on.
    """
    step = source.step
    if step is None:
        return
    contents = Contents.read(step)
    if not contents.safetensors or not contents.has_dcp(step.dcp):
        return
    _require_whole(step, contents)
    kept = tuple(
        record for path, record in contents.records.items() if not path.is_relative_to(step.dcp)
    )
    manifest = replace(
        contents.manifest, files=kept, checkpoint_format=CheckpointFormat.SAFETENSORS
    )
    with temporary_folder(*_workspace(source, None)) as temporary:
        with hashed_file(temporary / MANIFEST) as file:
            file.write(manifest.to_json().encode())
        os.replace(temporary / MANIFEST, step.manifest)
        flush_folder(step.path)


def _require_whole(step: StepFolder, contents: Contents) -> None:
    records = [contents.records[path] for path in contents.safetensors]
    if problems := list(file_problems(step, records, "full")):
        raise DamagedCheckpoint(problems[:10], source=str(step.path))


def _left_shards(source: ConversionSource) -> list[Path]:
    """Shards that a conversion was to remove, and died after the manifest had forgotten them."""
    if source.step is None or not source.step.dcp.is_dir():
        return []
    if Contents.read(source.step).has_dcp(source.step.dcp):
        return []
    return [*_our_shards(source.step.dcp), source.step.dcp / DCP_METADATA]


def _our_shards(folder: Path) -> list[Path]:
    """All that a save left there, except for `.metadata`."""
    return [*sorted(folder.glob("*.distcp")), *folder.glob(DCP_INDEX)]


def _finish_deletion(source: ConversionSource, shards: list[Path]) -> ConvertResult:
    assert source.step is not None
    step, contents = source.step, Contents.read(source.step)
    _require_whole(step, contents)
    cleared = clear(*_workspace(source, None))
    return ConvertResult(
        step.pretrained_model,
        {path.name: contents.records[path].size_bytes for path in contents.safetensors},
        len(source.tensors),
        Counter(SAFETENSORS_BY_TORCH[tensor.dtype] for tensor in source.tensors.values()),
        (),
        _delete(step.dcp, shards),
        tuple(cleared),
    )


def _delete_shards(source: ConversionSource) -> tuple[Path, ...]:
    return _delete(source.folder, _shard_files(source))


def _delete(folder: Path, shards: Sequence[Path]) -> tuple[Path, ...]:
    for path in reversed(shards):
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    return tuple(shards)


def _result(
    source: ConversionSource,
    folder: Path,
    files: Sequence[OutputFile],
    deleted: tuple[Path, ...],
    cleared: Sequence[Path],
) -> ConvertResult:
    tensors = [tensor for file in files for tensor in file.tensors]
    return ConvertResult(
        folder,
        {file.name: file.size_bytes for file in files},
        len(tensors),
        Counter(tensor.dtype for tensor in tensors),
        source.left_out,
        deleted,
        tuple(cleared),
    )
