"""What a conversion has done, for programs and for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt.errors import printable
from parallel_config.errors import counted

MAX_LISTED = 5


@dataclass(frozen=True)
class ConvertResult:
    """What was written."""

    path: Path
    """The folder that holds the weights now."""
    files: Mapping[str, int]
    """Bytes of each file of weights, by name."""
    num_tensors: int
    dtypes: Mapping[str, int]
    """Number of tensors by dtype."""
    left_out: tuple[str, ...]
    """Keys of the source that are not weights."""
    deleted: tuple[Path, ...]
    """Files of the source that were removed, as asked."""
    cleared: tuple[Path, ...]
    """Folders of conversions to the same place that had not finished; they were removed first."""

    @property
    def num_bytes(self) -> int:
        """Of all files of weights together."""
        return sum(self.files.values())

    def render(self) -> str:
        """Lines for people."""
        dtypes = ", ".join(f"{count} x {dtype}" for dtype, count in sorted(self.dtypes.items()))
        lines = [
            f"{self.path}: {counted(self.num_tensors, 'tensor')} ({dtypes}), "
            f"{self.num_bytes:,} bytes in {counted(len(self.files), 'file')}, "
            "read back and compared"
        ]
        if self.left_out:
            keys = ", ".join(key[:80] for key in self.left_out[:MAX_LISTED])
            more = f" and {len(self.left_out) - MAX_LISTED} more" * (
                len(self.left_out) > MAX_LISTED
            )
            lines.append(f"  left out, because they are not weights: {keys}{more}")
        if self.deleted:
            lines.append(
                f"  removed {counted(len(self.deleted), 'file')} of {self.deleted[0].parent}"
            )
        lines += [f"  removed {path}, which a conversion left" for path in self.cleared]
        return printable("\n".join(lines))
