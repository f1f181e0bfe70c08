"""`ptrain verify`: is every file of a checkpoint what was committed? Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt.errors import printable
from parallel_ckpt.layout import StepFolder
from parallel_ckpt.store.find import resolve_checkpoint
from parallel_ckpt.store.integrity import file_problems, identity_problems
from parallel_ckpt.store.manifest import Manifest, read_manifest
from parallel_config import Problem
from parallel_config.errors import counted


@dataclass(frozen=True)
class VerifyReport:
    """What was found."""

    path: Path
    """The step folder."""
    manifest: Manifest
    problems: tuple[Problem, ...]
    """One per file that is missing or differs, and per fact that contradicts the manifest."""
    unlisted: tuple[str, ...]
    """Files that the manifest does not know; they are not read by anything."""
    fast: bool
    """Whether only sizes were compared."""

    @property
    def ok(self) -> bool:
        """Whether every committed file is intact."""
        return not self.problems

    def render(self) -> str:
        """Lines for people."""
        how = "sizes" if self.fast else "sizes and checksums"
        files, size = counted(len(self.manifest.files), "file"), self.manifest.num_bytes
        lines = [f"{self.path}: step {self.manifest.step}, {files}, {size:,} bytes"]
        lines += [f"  damaged: {problem}" for problem in self.problems]
        lines += [f"  not part of the checkpoint: {name}" for name in self.unlisted]
        damaged = f"damaged: {counted(len(self.problems), 'problem')}"
        lines.append(f"intact ({how})" if self.ok else damaged)
        return printable("\n".join(lines))


def verify(path: str | Path, *, fast: bool = False) -> VerifyReport:
    """Compare every file of a checkpoint with its manifest. No collective.

    `path` is anything `resolve_checkpoint` understands; `fast` compares sizes only.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        DamagedCheckpoint: its manifest cannot be read.
    """
    folder = StepFolder(resolve_checkpoint(path))
    manifest = read_manifest(folder)
    found = (
        *identity_problems(folder, manifest),
        *file_problems(folder, manifest.files, "fast" if fast else "full"),
    )
    listed = {record.path for record in manifest.files} | {folder.manifest.name}
    present = (p.relative_to(folder.path).as_posix() for p in folder.path.rglob("*") if p.is_file())
    return VerifyReport(folder.path, manifest, found, tuple(sorted(set(present) - listed)), fast)
