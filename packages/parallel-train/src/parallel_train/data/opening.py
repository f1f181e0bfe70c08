"""What opening a dataset finds: what is used, what is left out and why, and all that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from parallel_config import ConfigError, Problem
from parallel_train.data import frames
from parallel_train.data.cameras import Cameras
from parallel_train.data.lerobot import FrameReader, LeRobotDataset
from parallel_train.data.metadata import BOOKKEEPING, Metadata, read_metadata
from parallel_train.data.spec import NUMBERS, Feature, is_learned

T = TypeVar("T")
TOLERANCE_S = 1e-4


def left_out(dataset: LeRobotDataset, policy: FrameReader) -> Iterator[str]:
    """At most one line: observations that a policy is trained without, and why."""
    reads = getattr(policy, "reads", is_learned)
    found: list[str] = []
    for name, feature in sorted(dataset.metadata.spec.features.items()):
        seen = dataset.metadata.rename.get(name, name)
        why = "" if not is_learned(seen) else _why_not(seen, feature, reads, policy)
        if name in dataset.unreadable:
            why = dataset.unreadable[name].rstrip(".")
        if why:
            found.append(f"{seen} ({why})")
    if found:
        yield f"left out of the data: {', '.join(found)}"


def _why_not(name: str, feature: Feature, reads: Callable[[str], bool], policy: FrameReader) -> str:
    if feature.is_image:
        return "" if name in policy.camera_names else "not in --policy.cameras"
    if feature.dtype not in NUMBERS:
        return f"{feature.dtype} is not a number"
    if not reads(name):
        return "the policy does not read it"
    return "" if feature.is_vector else f"shape {list(feature.shape)}: only vectors are read"


@dataclass(frozen=True)
class Examination:
    """What was found in a dataset's folder, without a policy: everything in it is demanded."""

    facts: tuple[str, ...]
    """What is there."""
    problems: tuple[Problem, ...]
    """What is wrong, each with a remedy."""


def examine(root: Path) -> Examination:
    """Look at everything in a dataset's folder; one problem does not hide the others."""
    problems: list[Problem] = []
    metadata = _tried(problems, lambda: read_metadata(root))
    if metadata is None:
        return Examination((), tuple(problems))
    facts = [*_described(metadata)]
    # A column that is not read is left out with a reason. So a damaged one is still found.
    loaded = _tried(problems, lambda: frames.read_frames(metadata, None, lambda name: False))
    if loaded is not None:
        for name, why in loaded.left_out.items():
            way = f"Correct the column, or train with a policy that does not read {name}."
            problems.append(Problem("dataset.root", f"= {str(root)!r}: {why}", way))
        _examine_numbers(problems, metadata, loaded)
    everything = np.arange(metadata.num_frames)
    index = everything - frames.episode_bounds(metadata.episodes)[0]
    for camera, feature in metadata.policy_spec.features.items():
        if not (is_learned(camera) and feature.is_image):
            continue
        if feature.dtype == "image" and loaded is None:
            continue  # they lie in the rows that could not be read
        stored = None if loaded is None else loaded.places
        opened = _tried(
            problems, partial(Cameras, metadata, index, [camera], TOLERANCE_S, stored=stored)
        )
        if opened is not None:
            height, width = opened.sizes[camera]
            facts.append(f"{camera}: pictures of {height} x {width}")
            _tried(problems, partial(opened.statistics, camera, everything, "file", demanded=True))
    return Examination(tuple(facts), tuple(problems))


def _examine_numbers(problems: list[Problem], metadata: Metadata, loaded: frames.Loaded) -> None:
    columns, chosen = loaded.columns, np.arange(metadata.num_frames)
    _tried(problems, partial(frames.check_timestamps, metadata, loaded, tolerance_s=TOLERANCE_S))
    for name in frames.learned(metadata, columns):
        bad = len(problems)
        _tried(problems, partial(frames.check_values, metadata, columns, chosen, name.__eq__))
        # Statistics of values that are not finite say nothing.
        if len(problems) == bad:
            _tried(problems, partial(frames.stats_of_file, metadata, loaded, chosen, name))


def _described(metadata: Metadata) -> Iterator[str]:
    lengths = [episode.end - episode.first for episode in metadata.episodes]
    yield (
        f"{metadata.num_frames:,} frames in {len(lengths):,} episode(s) of {min(lengths):,} to "
        f"{max(lengths):,} frames, at {metadata.spec.fps:g} fps"
    )
    tasks = metadata.spec.tasks
    yield (
        f"{len(tasks):,} task(s): " + ", ".join(map(repr, tasks[:4])) + (" ..." * (len(tasks) > 4))
    )
    vectors = [
        f"{name} {list(feature.shape)}"
        for name, feature in sorted(metadata.spec.features.items())
        if name not in BOOKKEEPING and feature.is_vector
    ]
    yield f"vectors: {', '.join(vectors)}"
    others = [
        f"{name} ({feature.dtype} of shape {list(feature.shape)})"
        for name, feature in sorted(metadata.spec.features.items())
        if is_learned(name) and not (feature.is_vector or feature.is_image)
    ]
    if others:
        yield f"read by no policy of this package: {', '.join(others)}"


def _tried(problems: list[Problem], look: Callable[[], T]) -> T | None:
    """What `look` finds, or None where it adds problems."""
    try:
        return look()
    except ConfigError as error:
        problems += error.problems
        return None
