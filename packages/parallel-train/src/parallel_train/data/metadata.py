"""Reads and checks the `meta` folder of a LeRobotDataset v3.0: what it says about itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parallel_config import ConfigError, Problem
from parallel_config.errors import nearest
from parallel_train.data.spec import ACTION, NUMBERS, DataSpec, Feature, is_learned

VERSION = "v3.0"
BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns that every dataset has, one number per frame."""
COPY = "Copy the dataset again."
_CONVERT = (
    "Convert it with LeRobot's own script: python -m "
    "lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id <user/name> (LeRobot 0.4)."
)


@dataclass(frozen=True)
class VideoSpan:
    """Where the frames of one episode and camera lie."""

    file: str
    """Relative to the dataset's folder."""
    from_s: float
    """Time of the episode's first frame inside the file."""


@dataclass(frozen=True)
class Episode:
    """One demonstration."""

    number: int
    first: int
    """Index of its first frame in the whole dataset."""
    end: int
    """Index after its last frame."""
    data_file: str
    """Parquet file of its frames, relative to the dataset's folder."""
    videos: Mapping[str, VideoSpan] = field(default_factory=dict)
    """By camera."""


@dataclass(frozen=True)
class Metadata:
    """Everything in the `meta` folder."""

    root: Path
    spec: DataSpec
    """By the dataset's names, as everything here."""
    episodes: tuple[Episode, ...]
    """In the order of their frames."""
    stats: Mapping[str, Any]
    """`stats.json` as it is, by feature."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """The dataset's name to the policy's, where they differ."""

    @property
    def policy_spec(self) -> DataSpec:
        """What a policy is built for: the features by the names that it reads."""
        return self.spec.renamed(self.rename)

    @property
    def stored_names(self) -> dict[str, str]:
        """The policy's name of every feature to the dataset's."""
        return {self.rename.get(name, name): name for name in self.spec.features}

    def with_sizes(self, sizes: Mapping[str, tuple[int, int]]) -> Metadata:
        """The same, where pictures have the height and width that the videos have."""
        features = dict(self.spec.features)
        for name, size in sizes.items():
            old = features[name]
            features[name] = Feature(old.dtype, (*size, *old.shape[2:]), old.names)
        return replace(self, spec=replace(self.spec, features=features))

    @property
    def num_frames(self) -> int:
        """Frames in the whole dataset."""
        return self.episodes[-1].end


def folder_error(root: Path, message: str, remedy: str = "") -> ConfigError:
    """The error of a dataset folder: which folder, what was found, the way out."""
    field, value = "dataset.root", repr(str(root))
    # In the cache of the Hub's client: datasets--user--name/snapshots/COMMIT.
    cached, kind = root.parent.parent.name, "datasets--"
    if root.parent.name == "snapshots" and cached.startswith(kind):
        repo_id = cached.removeprefix(kind).replace("--", "/")
        field, value = "dataset.repo_id", f"{repo_id!r} (in {root})"
    return ConfigError(Problem(field, f"= {value}: {message}", remedy))


def read_metadata(root: Path, rename: Mapping[str, str] | None = None) -> Metadata:
    """Read and check the `meta` folder.

    `rename` gives features the names by which the policy reads them (`DatasetConfig.rename`).

    Raises:
        ConfigError: the folder is not a LeRobotDataset v3.0, its metadata is damaged, or a feature
            cannot be renamed so.
    """
    if not root.is_dir():
        raise folder_error(
            root,
            "this folder does not exist.",
            "Use --dataset.root with the folder that holds meta/info.json.",
        )
    info = _read_info(root)
    features, rename = _read_features(root, info), dict(rename or {})
    problems = [*_rename_problems(root, features, rename)]
    if problems:
        raise ConfigError(problems)
    spec = DataSpec(info["fps"], _as_vectors(features, rename), _read_tasks(root))
    episodes = _read_episodes(root, info, features)
    # A copy that was cut short has fewer episodes than info.json counts.
    total = info.get("total_frames")
    if episodes[-1].end != total:
        raise folder_error(
            root,
            f"its episodes have {episodes[-1].end} frames, but meta/info.json says {total}.",
            COPY,
        )
    stats = _read_json(root, "meta/stats.json") if (root / "meta/stats.json").exists() else {}
    return Metadata(root, spec, episodes, stats if isinstance(stats, dict) else {}, rename)


def read_table(root: Path, relative: str, columns: list[str] | None = None) -> pa.Table:
    """Read one parquet file of the dataset; of `columns`, those that it has.

    Raises:
        ConfigError: it is missing or damaged.
    """
    try:
        # One file by itself: pyarrow's datasets would make columns of folder names such as a=1.
        with pq.ParquetFile(root / relative) as file:
            present = set(file.schema_arrow.names)
            return file.read(columns=[n for n in columns if n in present] if columns else None)
    except FileNotFoundError as error:
        raise folder_error(root, f"{relative} is missing.", COPY) from error
    except (OSError, pa.ArrowException) as error:
        raise folder_error(root, f"{relative} cannot be read: {error}.", COPY) from error


def _read_json(root: Path, name: str) -> Any:
    try:
        # Editors on Windows put a byte order mark in front.
        return json.loads((root / name).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise folder_error(
            root,
            f"{name} is missing.",
            f"A LeRobotDataset {VERSION} folder holds {name}: check the path and the copy.",
        ) from error
    except OSError as error:
        raise folder_error(root, f"{name} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise folder_error(root, f"{name} is not valid JSON: {error}.", COPY) from error


def _read_info(root: Path) -> dict[str, Any]:
    info = _read_json(root, "meta/info.json")
    if not isinstance(info, dict):
        raise folder_error(root, "meta/info.json does not hold a mapping.", COPY)
    version = info.get("codebase_version")
    if version != VERSION:
        old = isinstance(version, str) and version.startswith(("v1", "v2"))
        raise folder_error(
            root,
            f"its format is {version!r}, but {VERSION} is read here.",
            _CONVERT if old else f"Use a dataset of format {VERSION}.",
        )
    fps = info.get("fps")
    # A bool is an int in Python.
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise folder_error(
            root,
            f"meta/info.json has fps = {fps!r}, but it must be a positive number.",
            "Correct this value: it is the rate at which the frames were recorded.",
        )
    return info


def _read_features(root: Path, info: Mapping[str, Any]) -> dict[str, Feature]:
    declared = info.get("features")
    features: dict[str, Feature] = {}
    for name, entry in (declared if isinstance(declared, dict) else {}).items():
        try:
            shape = tuple(int(n) for n in entry["shape"])
            features[name] = _oriented(
                Feature(str(entry["dtype"]), shape, _names(entry.get("names"))), entry
            )
        except (KeyError, TypeError, ValueError):
            raise folder_error(
                root,
                f"meta/info.json: feature {name!r} does not have a valid dtype and shape.",
                COPY,
            ) from None
    missing = [name for name in BOOKKEEPING if name not in features]
    if missing:
        raise folder_error(root, f"meta/info.json does not declare {', '.join(missing)}.")
    return features


def _as_vectors(features: Mapping[str, Feature], rename: Mapping[str, str]) -> dict[str, Feature]:
    """Actions and observations of every kind of number as float32, which is how they are read."""
    return {
        name: replace(feature, dtype="float32", shape=feature.shape or (1,))
        if feature.dtype in NUMBERS and is_learned(rename.get(name, name))
        else feature
        for name, feature in features.items()
    }


def _rename_problems(
    root: Path, features: Mapping[str, Feature], rename: Mapping[str, str]
) -> Iterator[Problem]:
    for old, new in rename.items():
        if old not in features:
            known = [name for name in features if name not in BOOKKEEPING]
            yield Problem(
                "dataset.rename",
                f"names {old!r}, which {str(root)!r} does not have.",
                f"{nearest(old, known)} It has: {', '.join(sorted(known))}.".strip(),
            )
        elif old in BOOKKEEPING:
            yield Problem(
                "dataset.rename",
                f"names {old!r}, a column that cannot be renamed.",
                "Leave it out.",
            )
        elif not new.strip():
            yield Problem("dataset.rename", f"gives {old!r} an empty name.", "Leave it out.")
    # Old names that stay count too: a new name must not meet one of them.
    sources: dict[str, list[str]] = {}
    for name in features:
        sources.setdefault(rename.get(name, name), []).append(name)
    for new, names in sources.items():
        if len(names) > 1:
            yield Problem(
                "dataset.rename",
                f"makes {new!r} the name of {' and of '.join(map(repr, names))}.",
                "Give each a name of its own.",
            )
    if ACTION not in sources:
        yield Problem(
            "dataset.root",
            f"= {str(root)!r}: no feature is named {ACTION!r}.",
            f"Name the one that holds the actions: --dataset.rename OLD={ACTION}. "
            f"It has: {', '.join(sorted(n for n in features if n not in BOOKKEEPING))}.",
        )


def _oriented(feature: Feature, entry: Mapping[str, Any]) -> Feature:
    """A picture's shape as [height, width, channels], whatever order its names tell."""
    if not feature.is_image:
        return feature
    if len(feature.shape) == 2:
        return Feature(feature.dtype, (*feature.shape, 1), None)
    shape, names = feature.shape, tuple(feature.names or ())
    if len(shape) != 3:
        raise ValueError(shape)
    # Some writers say "channel". Without names, a first dim of 1 or 3 can only be the channels.
    is_first = names[:1] in (("channels",), ("channel",), ("c",))
    if is_first or (not names and shape[0] in (1, 3) and shape[2] not in (1, 3)):
        shape = (shape[1], shape[2], shape[0])
    info = entry.get("info")
    if isinstance(info, dict) and info.get("video.is_depth_map") is True:
        shape = (*shape[:2], 1)
    return Feature(feature.dtype, shape, ("height", "width", "channels"))


def _names(found: object) -> tuple[str, ...] | None:
    """Some datasets nest the names under a word such as "motors"; those are left out."""
    return tuple(str(name) for name in found) if isinstance(found, list) else None


def _read_tasks(root: Path) -> tuple[str, ...]:
    table = read_table(root, "meta/tasks.parquet")
    # LeRobot keeps the text in the index of a data frame; its name differs between versions.
    texts = [name for name in table.column_names if name != "task_index"]
    if not texts or "task_index" not in table.column_names:
        raise folder_error(
            root, "meta/tasks.parquet does not have a task_index and a task text.", COPY
        )
    column = "task" if "task" in texts else texts[0]
    pairs = zip(table["task_index"].to_pylist(), table[column].to_pylist(), strict=True)
    tasks = sorted(pairs)
    # A task's place in the tuple is its task_index.
    if [index for index, _ in tasks] != list(range(len(tasks))):
        raise folder_error(root, "meta/tasks.parquet does not number its tasks 0, 1, 2 ...", COPY)
    return tuple(str(text) for _, text in tasks)


def _read_episodes(
    root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]
) -> tuple[Episode, ...]:
    rows = _episode_rows(root)
    videos = [name for name, feature in features.items() if feature.dtype == "video"]
    try:
        episodes = sorted(
            # The files need not list the episodes in order; their frames follow one another.
            (_episode(row, info, videos) for row in rows),
            key=lambda episode: episode.first,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise folder_error(
            root, f"meta/episodes or a path template of meta/info.json is incomplete: {error!r}."
        ) from error
    if not episodes:
        raise folder_error(
            root, "it does not have any episodes.", "Record some, or use another dataset."
        )
    empty = [episode.number for episode in episodes if episode.end <= episode.first]
    if empty:
        raise folder_error(
            root,
            f"episodes {empty[:10]} do not have any frames.",
            "Remove them with LeRobot's tools.",
        )
    ends = [0, *(episode.end for episode in episodes)]
    # Without gaps: a frame's number is its place in the columns.
    for end, episode in zip(ends, episodes, strict=False):
        if episode.first != end:
            raise folder_error(
                root,
                f"episode {episode.number} begins at frame {episode.first}, but the one before "
                f"it ends at {end}.",
                COPY,
            )
    return tuple(episodes)


def _episode_rows(root: Path) -> list[dict[str, Any]]:
    files = sorted((root / "meta/episodes").rglob("*.parquet"))
    if not files:
        raise folder_error(root, "meta/episodes does not hold a parquet file.", COPY)
    rows: list[dict[str, Any]] = []
    for file in files:
        table = read_table(root, str(file.relative_to(root)))
        # Statistics per episode are not used here.
        wanted = [name for name in table.column_names if not name.startswith("stats/")]
        rows.extend(table.select(wanted).to_pylist())
    return rows


def _episode(row: Mapping[str, Any], info: Mapping[str, Any], videos: list[str]) -> Episode:
    data_file = info["data_path"].format(
        chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
    )
    spans = {
        camera: VideoSpan(
            info["video_path"].format(
                video_key=camera,
                chunk_index=row[f"videos/{camera}/chunk_index"],
                file_index=row[f"videos/{camera}/file_index"],
            ),
            float(row[f"videos/{camera}/from_timestamp"]),
        )
        for camera in videos
    }
    first, end = int(row["dataset_from_index"]), int(row["dataset_to_index"])
    return Episode(int(row["episode_index"]), first, end, data_file, spans)
