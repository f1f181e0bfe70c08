"""`ptrain inspect`: what a checkpoint or a run holds, from its manifest and headers. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_ckpt.errors import CheckpointError, printable
from parallel_ckpt.formats.dtypes import SAFETENSORS_BY_TORCH, TORCH_ITEM_BYTES
from parallel_ckpt.formats.safetensors import read_header
from parallel_ckpt.layout import RunFolder, StepFolder, belongs_to_weights
from parallel_ckpt.store.commit import read_last
from parallel_ckpt.store.contents import Contents
from parallel_ckpt.store.find import committed, is_copied_last, resolve_checkpoint
from parallel_ckpt.store.integrity import file_problems, identity_problems
from parallel_ckpt.store.manifest import Manifest
from parallel_config.errors import counted

ByDtype = dict[str, tuple[int, int]]
"""Number and bytes of tensors by dtype."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint."""

    path: Path
    manifest: Manifest
    bytes_by_part: dict[str, int]
    """weights, optimizer, other."""
    tensors_by_dtype: ByDtype
    """Number and bytes of the weights by dtype."""
    optimizer_by_dtype: ByDtype
    """The same of the optimizer's state."""
    problems: tuple[str, ...]
    """Files that are missing or of another size (checksums are `verify`'s)."""

    def to_plain(self) -> dict[str, Any]:
        """JSON values."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "step": manifest.step,
            "samples_seen": manifest.samples_seen,
            "kind": manifest.topology.kind.value,
            "dp_replicate": manifest.topology.dp_replicate,
            "dp_shard": manifest.topology.dp_shard,
            "checkpoint_format": manifest.checkpoint_format.value,
            "format_version": manifest.format_version,
            "created_at": manifest.created_at,
            "num_files": len(manifest.files),
            "num_bytes": manifest.num_bytes,
            "bytes_by_part": self.bytes_by_part,
            "tensors_by_dtype": _plain(self.tensors_by_dtype),
            "optimizer_by_dtype": _plain(self.optimizer_by_dtype),
            "versions": dict(manifest.versions),
            "provenance": dict(manifest.provenance),
            "problems": list(self.problems),
        }

    def to_json(self) -> str:
        """For programs."""
        return json.dumps(self.to_plain(), indent=2)

    def render(self) -> str:
        """For people."""
        manifest = self.manifest
        parts = ", ".join(f"{name} {_size(n)}" for name, n in self.bytes_by_part.items())
        lines = [
            f"{self.path}",
            f"  step        {manifest.step}, {manifest.samples_seen} samples seen",
            f"  topology    {manifest.topology.describe()}",
            f"  format      {manifest.checkpoint_format.value} (layout {manifest.format_version})",
            f"  size        {_size(manifest.num_bytes)} in "
            f"{counted(len(manifest.files), 'file')}: {parts}",
            f"  weights     {_dtypes(self.tensors_by_dtype)}",
            f"  optimizer   {_dtypes(self.optimizer_by_dtype)}",
            f"  written     {manifest.created_at}, "
            + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        ]
        lines += [f"  damaged     {problem}" for problem in self.problems]
        lines.append(
            f"  health      damaged: {counted(len(self.problems), 'problem')}"
            if self.problems
            else "  health      every file is there with its size (checksums: ptrain verify)"
        )
        return printable("\n".join(lines))


@dataclass(frozen=True)
class RunInfo:
    """All checkpoints of a run, by step."""

    path: Path
    checkpoints: tuple[CheckpointInfo, ...]
    unreadable: tuple[str, ...]
    last: Path | None
    """What `last` means."""
    problems_of_last: tuple[str, ...] = ()
    """Why it does not name a checkpoint that can be read."""

    def to_json(self) -> str:
        """For programs."""
        return json.dumps(
            {
                "path": str(self.path),
                "last": str(self.last) if self.last else None,
                "checkpoints": [info.to_plain() for info in self.checkpoints],
                "unreadable": list(self.unreadable),
                "problems_of_last": list(self.problems_of_last),
            },
            indent=2,
        )

    def render(self) -> str:
        """For people: a line per checkpoint, then `last` or the highest step in full."""
        lines = [f"{self.path}: {counted(len(self.checkpoints), 'checkpoint')}"]
        for info in self.checkpoints:
            mark = " <- last" if info.path == self.last else ""
            problems = counted(len(info.problems), "problem")
            health = f"  DAMAGED ({problems})" if info.problems else ""
            lines.append(
                f"  {info.path.name}  {info.manifest.topology.kind.value}  "
                f"{info.manifest.checkpoint_format.value}  {_size(info.manifest.num_bytes)}"
                f"{health}{mark}"
            )
        lines += [f"  unreadable: {line}" for line in self.unreadable]
        lines += [f"  last: {line}" for line in self.problems_of_last]
        shown = [i for i in self.checkpoints if i.path == self.last] or self.checkpoints[-1:]
        return printable("\n".join([*lines, *(info.render() for info in shown)]))


def inspect(path: str | Path) -> CheckpointInfo | RunInfo:
    """Look at a checkpoint, or at a run folder with all its checkpoints. No collective.

    Raises:
        CheckpointNotFound: there is not any.
        DamagedCheckpoint: the manifest of the named checkpoint cannot be read.
    """
    run = RunFolder(Path(path).expanduser().absolute())
    if run.checkpoints.is_dir() and committed(run):
        return _inspect_run(run)
    return _inspect_step(StepFolder(resolve_checkpoint(path)))


def _inspect_run(run: RunFolder) -> RunInfo:
    found, unreadable = [], []
    for _, step in sorted(committed(run).items()):
        folder = StepFolder(step.path.resolve())
        try:
            found.append(_inspect_step(folder))
        except (CheckpointError, OSError) as error:
            unreadable.append(str(error))
    last = resolve_checkpoint(run.path)
    problem = _problem_of_last(run, last, readable={info.path for info in found})
    return RunInfo(run.path, tuple(found), tuple(unreadable), last, problem)


def _problem_of_last(run: RunFolder, last: Path, readable: set[Path]) -> tuple[str, ...]:
    if last not in readable:
        return (f"names {last.name}, which cannot be read.",)
    if is_copied_last(run.last):
        return ("is a folder of its own, which no save updates.",)
    if not os.path.lexists(run.last):
        return ("is missing.",)
    if read_last(run) is None:
        return ("does not lead to a checkpoint.",)
    return ()


def _inspect_step(folder: StepFolder) -> CheckpointInfo:
    contents = Contents.read(folder)
    manifest = contents.manifest
    sizes = {"weights": 0, "optimizer": 0, "other": 0}
    for path, record in contents.records.items():
        sizes[_part(folder, path)] += record.size_bytes
    problems = [
        str(problem)
        for problem in (
            *identity_problems(folder, manifest),
            *file_problems(folder, manifest.files, "fast"),
        )
    ]
    weights: ByDtype = {}
    optimizer: ByDtype = {}
    for read, into in ((_weights, weights), (_optimizer, optimizer)):
        try:
            into.update(_by_dtype(read(contents)))
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
    return CheckpointInfo(folder.path, manifest, sizes, weights, optimizer, tuple(problems))


def _part(folder: StepFolder, path: Path) -> str:
    """Which part of a checkpoint a file belongs to."""
    beside_config = path.parent == folder.pretrained_model
    if path.parent == folder.dcp or (beside_config and belongs_to_weights(path.name)):
        return "weights"
    is_optimizer = path.parent == folder.optimizer or path == folder.optimizer_index
    return "optimizer" if is_optimizer else "other"


def _by_dtype(tensors: Iterator[tuple[str, int]]) -> ByDtype:
    found: ByDtype = {}
    for dtype, num_bytes in tensors:
        count, size = found.get(dtype, (0, 0))
        found[dtype] = (count + 1, size + num_bytes)
    return found


def _weights(contents: Contents) -> Iterator[tuple[str, int]]:
    """Dtype and bytes of each, from headers or DCP metadata alone."""
    for file in filter(Path.is_file, contents.safetensors):
        for entry in read_header(file).tensors.values():
            yield entry.dtype, entry.num_bytes
    if not contents.safetensors:
        yield from _dcp(contents, contents.folder.dcp)


def _optimizer(contents: Contents) -> Iterator[tuple[str, int]]:
    yield from _dcp(contents, contents.folder.optimizer)


def _dcp(contents: Contents, folder: Path) -> Iterator[tuple[str, int]]:
    if contents.has_dcp(folder) and contents.dcp_document(folder).is_file():
        for tensor in contents.stored_dcp(folder).tensors.values():
            name = SAFETENSORS_BY_TORCH.get(tensor.dtype, tensor.dtype)
            yield name, math.prod(tensor.shape) * TORCH_ITEM_BYTES[tensor.dtype]


def _plain(by_dtype: ByDtype) -> dict[str, dict[str, int]]:
    return {dtype: {"count": count, "num_bytes": size} for dtype, (count, size) in by_dtype.items()}


def _dtypes(by_dtype: ByDtype) -> str:
    parts = [f"{count} x {dtype} ({_size(n)})" for dtype, (count, n) in sorted(by_dtype.items())]
    return ", ".join(parts) or "none"


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
