"""DatasetConfig: which demonstrations a run is trained on and how they are loaded; torch-free."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from parallel_config import Problem
from parallel_config.errors import report
from parallel_publish.client import cached_dataset
from parallel_publish.config import is_branch, is_repo_id

EMBEDDED_ROOT = Path(__file__).parent.parent / "assets" / "metaworld_mini"
"""The dataset that ships in the package."""


Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ImageTransformsConfig:
    """Random changes of the pictures that are trained on, with LeRobot's defaults. Held-out
    pictures are never changed.
    """

    enable: bool = False
    """Change the pictures. What is drawn for a sample depends on the seed and on the sample's place
    in the order of training, not on ranks or workers."""
    max_num_transforms: int = 3
    """How many of the transforms below each picture gets."""
    random_order: bool = False
    """Apply them in a random order, not in the order of the fields."""
    brightness: Range | None = (0.8, 1.2)
    """Factors to draw from; 1 changes nothing. None leaves this transform out."""
    contrast: Range | None = (0.8, 1.2)
    """Factors to draw from; None leaves it out."""
    saturation: Range | None = (0.5, 1.5)
    """Factors to draw from; None leaves it out."""
    hue: Range | None = (-0.05, 0.05)
    """Shifts to draw from, as parts of the circle of hues: -0.5 to 0.5. None leaves it out."""
    sharpness: Range | None = (0.5, 1.5)
    """Factors to draw from; None leaves it out."""
    affine: Range | None = (-5.0, 5.0)
    """Degrees to rotate by, together with the shift of `translate`; None leaves both out."""
    translate: Range = (0.05, 0.05)
    """Largest shift across and down, as parts of the picture's width and height."""
    weights: dict[str, float] = field(default_factory=dict)
    """How often a transform is chosen beside the others, by its name; 1 for those not named."""

    def __post_init__(self) -> None:
        report(self._problems())

    @property
    def ranges(self) -> dict[str, Range]:
        """Of the transforms that are not left out, by name, in the order of application."""
        found = {name: getattr(self, name) for name in _LIMITS}
        return {name: limits for name, limits in found.items() if limits is not None}

    def _problems(self) -> Iterator[Problem]:
        for name, (low, high) in self.ranges.items():
            least, most, usual = _LIMITS[name]
            if not least <= low <= high <= most:
                yield _problem(
                    name,
                    f"= {low:g} {high:g}, but it must be two numbers from {least:g} to {most:g}, "
                    "the smaller first.",
                    usual,
                )
        if not all(0 <= share <= 1 for share in self.translate):
            across, down = self.translate
            yield _problem(
                "translate",
                f"= {across:g} {down:g}, but it must be two numbers from 0 to 1.",
                "0.05 0.05",
            )
        for name, weight in self.weights.items():
            if name not in _LIMITS:
                known = ", ".join(_LIMITS)
                yield _problem(
                    "weights", f"names {name!r}, but the transforms are {known}.", "hue=0.5"
                )
            elif not 0 <= weight < math.inf:
                yield _problem(
                    "weights", f"{name} = {weight}, but it must be at least 0.", f"{name}=1"
                )
        usable = [name for name in self.ranges if self.weights.get(name, 1.0) > 0]
        if self.enable and not 1 <= self.max_num_transforms <= len(usable):
            yield _problem(
                "max_num_transforms",
                f"= {self.max_num_transforms}, but {len(usable)} transform(s) are in use, and it "
                f"must be from 1 to that number.",
                str(min(3, max(1, len(usable)))),
            )


_LIMITS = {
    # Factors below 0 would turn a picture's values around; beyond these, nothing is to be seen.
    "brightness": (0.0, 100.0, "0.8 1.2"),
    "contrast": (0.0, 100.0, "0.8 1.2"),
    "saturation": (0.0, 100.0, "0.5 1.5"),
    "hue": (-0.5, 0.5, "-0.05 0.05"),
    "sharpness": (0.0, 100.0, "0.5 1.5"),
    "affine": (-180.0, 180.0, "-5 5"),
}
"""Transforms in the order of their application: smallest and largest number, and a usual range."""


def _problem(name: str, message: str, usual: str) -> Problem:
    path = f"dataset.image_transforms.{name}"
    return Problem(path, message, f"Use --{path} {usual}.")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A LeRobotDataset v3.0, in a folder or on the Hub, and how its frames reach the model."""

    repo_id: str | None = None
    """Dataset on the Hub, as user/name or user/name@revision, in place of `root`. A folder of this
    name in LeRobot's cache (HF_LEROBOT_HOME) is taken where no revision is named. Otherwise the
    files that the run needs are fetched into the cache of the Hub's client."""
    revision: str | None = None
    """Branch, tag or commit of `repo_id`; None means main. A run saves the commit that it found, so
    that a resume reads the same data."""
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
    image_transforms: ImageTransformsConfig = field(default_factory=ImageTransformsConfig)
    """Random changes of the pictures that are trained on."""
    num_workers: int | None = None
    """Loader processes per rank; 0 loads in the training process. None: 4 on a GPU, else 0."""
    prefetch_factor: int = 2
    """Micro-batches that each worker keeps ready."""
    pin_memory: bool = True
    """Stage batches in page-locked memory when the device is a GPU."""

    def __post_init__(self) -> None:
        # A shell does not expand --dataset.root=~/data, nor a path in a file.
        if self.repo_id is not None and self.revision is None and "@" in self.repo_id:
            name, _, revision = self.repo_id.partition("@")
            object.__setattr__(self, "repo_id", name)
            object.__setattr__(self, "revision", revision)
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

    def at(self, commit: str) -> DatasetConfig:
        """The same dataset of the Hub at a commit."""
        return replace(self, revision=commit or None)

    @property
    def folder(self) -> Path:
        """The folder to read: `root`, that of `repo_id`, or the dataset in the package.

        Of `repo_id` it is LeRobot's own folder where no revision is named, and otherwise that of a
        commit in the cache of the Hub's client (`data.fetch` brings it there).
        """
        if self.root is not None:
            return Path(self.root)
        if self.repo_id is None:
            return EMBEDDED_ROOT
        if self.revision is None:
            return lerobot_folder(self.repo_id)
        return cached_dataset(self.repo_id, self.revision)

    @property
    def name(self) -> str:
        """What to call the data in public: the repository, or the folder without its path."""
        return self.repo_id or self.folder.name

    def workers(self, device_type: str) -> int:
        """Loader processes of one rank that computes on a device of this type ("cuda", "cpu")."""
        if self.num_workers is not None:
            return self.num_workers
        # A GPU would wait for the host; on a CPU, workers would take the model's own cores.
        return 4 if device_type == "cuda" else 0

    def _problems(self) -> Iterator[Problem]:
        yield from self._repo_problems()
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

    def _repo_problems(self) -> Iterator[Problem]:
        repo_id, revision = self.repo_id, self.revision
        if repo_id is not None and self.root is not None:
            yield Problem(
                "dataset.repo_id",
                f"= {repo_id!r} and dataset.root = {self.root!r} name two datasets.",
                "Use one of both; the other is left out with --dataset.repo_id None or "
                "--dataset.root None.",
            )
        if repo_id is not None and not is_repo_id(repo_id, namespace=True):
            at = ", and --dataset.revision names another revision" if "@" in repo_id else ""
            yield Problem(
                "dataset.repo_id",
                f"= {repo_id!r}, but it must be a dataset on the Hub, as user/name{at}.",
                "Use --dataset.repo_id user/name, or --dataset.root with a folder.",
            )
        if revision is not None and repo_id is None:
            yield Problem(
                "dataset.revision",
                f"= {revision!r}, but a folder does not have revisions.",
                "Use --dataset.repo_id too, or --dataset.revision None.",
            )
        elif revision is not None and not is_branch(revision):
            yield Problem(
                "dataset.revision",
                f"= {revision!r} is not a branch, tag or commit.",
                "Use --dataset.revision main.",
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


def lerobot_folder(repo_id: str) -> Path:
    """Where LeRobot keeps a dataset that it recorded or fetched."""
    cache = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    home = os.environ.get("HF_LEROBOT_HOME") or Path(cache) / "lerobot"
    return Path(home).expanduser() / repo_id
