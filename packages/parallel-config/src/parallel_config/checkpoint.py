"""Which weight artifacts a checkpoint holds, how often it is written and how many are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from parallel_config.errors import Problem, report


class CheckpointFormat(StrEnum):
    """Weight artifacts of a checkpoint; the optimizer is always saved through DCP."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"
    SAFETENSORS_DCP = "safetensors_dcp"

    @property
    def has_safetensors(self) -> bool:
        """Whether the weights are written as `model.safetensors` (or shards with an index)."""
        return self is not CheckpointFormat.DCP

    @property
    def has_dcp(self) -> bool:
        """Whether the weights are written as DCP shards."""
        return self is not CheckpointFormat.SAFETENSORS


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, kept and checked."""

    save_freq: int = 500
    """Optimizer updates between checkpoints; 0 saves only at the end of the run."""
    keep_last: int | None = None
    """Checkpoints to keep, the last ones written; None keeps all."""
    keep_every: int | None = None
    """Besides those of keep_last, keep each whose step is a multiple of this; without keep_last all
    are kept anyway."""
    async_save: bool = False
    """Write in the background; training pauses only while the shards are copied."""
    verify: Literal["full", "fast"] = "full"
    """Before loading: compare checksums of every file (full), or sizes only (fast)."""
    max_shard_size: str = "5GB"
    """Largest safetensors file; bigger models are split with an index (units: MB, GB, MiB, GiB)."""

    def __post_init__(self) -> None:
        report(self._problems())

    def _problems(self) -> Iterator[Problem]:
        if self.save_freq < 0:
            yield Problem(
                "checkpoint.save_freq",
                f"= {self.save_freq}, but it counts updates.",
                "Use --checkpoint.save_freq 0 to save only at the end of the run.",
            )
        # keep_every without keep_last changes nothing, but it is not refused: configs of older
        # runs hold it.
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(
                    f"checkpoint.{name}",
                    f"= {value}, but it must be at least 1.",
                    f"Use --checkpoint.{name} None to keep all.",
                )
        try:
            parse_size(self.max_shard_size)
        except ValueError as error:
            yield Problem(
                "checkpoint.max_shard_size", f"= {error}", "Use --checkpoint.max_shard_size 5GB."
            )


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str | int) -> int:
    """Bytes in a size such as `5GB` or `512MiB`, or in a plain number of them.

    Raises:
        ValueError: the number or the unit is wrong, or the size is below one byte.
    """
    text = str(text)
    # The unit is taken off first, so that a number may have a point or an exponent ("1.5e3 MB").
    number = text.strip().rstrip("BbKkMmGgTtIi ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        # float() takes "inf" as well, which int() then refuses by OverflowError.
        num_bytes = int(float(number) * _UNITS[unit or "B"])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a size; write a number and a unit, such as 5GB or 512MiB."
        ) from None
    if num_bytes < 1:
        raise ValueError(f"{text!r} is not a size of at least one byte.")
    return num_bytes
