"""DatasetConfig: which demonstrations a run is trained on and how they are loaded; torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from parallel_config import Problem
from parallel_config.errors import report

EMBEDDED_ROOT = Path(__file__).parent.parent / "assets" / "metaworld_mini"
"""The dataset that ships in the package."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A LeRobotDataset v3.0 folder and how its frames reach the model."""

    root: str | None = None
    """Folder of the dataset (the one that holds meta/info.json), saved as an absolute path. None
    means the dataset that ships in the package, which was recorded from MetaWorld's scripted
    experts."""
    episodes: tuple[int, ...] | None = None
    """Episodes to train on, by number; None takes every one."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for features: OLD is the dataset's name, NEW is the policy's. Give OLD=NEW pairs
    or one JSON mapping; in a file, give a mapping. It is saved with the model, which then reads
    both names."""
    stats: Literal["file", "data"] = "file"
    """Where the statistics for normalization come from. "file" takes meta/stats.json, which covers
    all episodes, and checks it against the frames and a sample of the pictures. "data" computes
    them from the episodes that are trained on, those of cameras from a sample of their pictures."""
    tolerance_s: float = 1e-4
    """Largest distance, in seconds, between a timestamp and its frame, below half a frame. The
    nearest frame is always taken; the tolerance only refuses."""
    num_workers: int | None = None
    """Loader processes per rank; 0 loads in the training process. None: 4 on a GPU, else 0."""
    prefetch_factor: int = 2
    """Micro-batches that each worker keeps ready."""
    pin_memory: bool = True
    """Stage batches in page-locked memory when the device is a GPU."""

    def __post_init__(self) -> None:
        # A shell does not expand --dataset.root=~/data, nor a path in a file.
        if self.root is not None and self.root.startswith("~"):
            object.__setattr__(self, "root", str(Path(self.root).expanduser()))
        if self.episodes is not None:
            # The dataclass is frozen; a caller may give a list.
            object.__setattr__(self, "episodes", tuple(self.episodes))
        report(self._problems())

    def rooted(self) -> DatasetConfig:
        """The same with `root` as an absolute path.

        A run that is resumed from another folder must not find another dataset under the same name.
        A published config keeps the bare name: it does not say where the data lay.
        """
        return self if self.root is None else replace(self, root=str(Path(self.root).absolute()))

    @property
    def folder(self) -> Path:
        """The folder to read: `root`, or the dataset that ships in the package."""
        return EMBEDDED_ROOT if self.root is None else Path(self.root)

    def workers(self, device_type: str) -> int:
        """Loader processes of one rank that computes on a device of this type ("cuda", "cpu")."""
        if self.num_workers is not None:
            return self.num_workers
        # A GPU would wait for the host; on a CPU, workers would take the model's own cores.
        return 4 if device_type == "cuda" else 0

    def _problems(self) -> Iterator[Problem]:
        if self.root is not None and not self.root.strip():
            yield Problem(
                "dataset.root",
                "= '' is not a folder.",
                "Use --dataset.root with a path, or leave it out for the dataset in the package.",
            )
        yield from self._episode_problems()
        if not (math.isfinite(self.tolerance_s) and self.tolerance_s > 0):
            yield Problem(
                "dataset.tolerance_s",
                f"= {self.tolerance_s}, but it must be a positive number of seconds.",
                "Use --dataset.tolerance_s 1e-4.",
            )
        for name, least in (("num_workers", 0), ("prefetch_factor", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                yield Problem(
                    f"dataset.{name}",
                    f"= {value}, but it must be at least {least}.",
                    f"Use --dataset.{name} {least} or more.",
                )

    def _episode_problems(self) -> Iterator[Problem]:
        if self.episodes is None:
            return
        way = "Use --dataset.episodes 0 1 2, or None for every one."
        if not self.episodes:
            yield Problem("dataset.episodes", "= [] does not choose any episode.", way)
        repeated = sorted({e for e in self.episodes if self.episodes.count(e) > 1})
        if repeated:
            yield Problem("dataset.episodes", f"names {repeated} more than once.", way)
        negative = sorted({e for e in self.episodes if e < 0})
        if negative:
            yield Problem("dataset.episodes", f"holds {negative}, but episodes count from 0.", way)
