"""Brings a dataset of the Hub to this machine: `meta` first, then only what a run reads."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from parallel_config import ConfigError
from parallel_publish import PublishError, Target
from parallel_publish.client import cached_dataset, note
from parallel_publish.fetching import on_main_at_leisure
from parallel_publish.hub import at_one_state, download, list_files
from parallel_publish.staging import check_disk
from parallel_train.data.config import DatasetConfig, lerobot_folder
from parallel_train.data.metadata import Metadata
from parallel_train.data.split import EvalConfig, split_episodes

_INFO = Path("meta/info.json")


def located(config: DatasetConfig) -> DatasetConfig:
    """The config of a dataset whose `meta` is on this machine, at a commit that will not change.

    What names a folder comes back with an absolute path. No collective.

    Raises:
        PublishError: the Hub does not have the dataset or the revision, or cannot be reached.
        ConfigError: it is not a dataset of LeRobot's.
    """
    if config.repo_id is None:
        return config.rooted()
    # What was recorded here, or fetched by LeRobot, has no commit. Only a named one goes past it.
    if config.revision is None and (lerobot_folder(config.repo_id) / _INFO).is_file():
        return config
    refs = cached_dataset(config.repo_id, "").parent / "refs"
    target = _target(config)
    known = _read(refs / target.revision)
    if config.revision == known and (config.folder / _INFO).is_file():
        return config  # a commit whose `meta` is whole: the Hub need not be asked
    try:
        commit = at_one_state(target).revision
    except PublishError as error:
        # Without a connection, the state that was fetched last still serves.
        found = config.at(known or target.revision)
        if not (found.folder / _INFO).is_file():
            raise
        note(f"{error}\ntaking {config.repo_id} as it was fetched before, at {found.revision}")
        return found
    download(replace(target, revision=commit), allow=["meta/*"])
    if not (config.at(commit).folder / _INFO).is_file():
        raise ConfigError.of(
            "dataset.repo_id",
            f"= {config.repo_id!r} does not hold {_INFO} at {target.revision}: it is not a "
            "LeRobotDataset v3.0.",
            "Use another repository or --dataset.revision.",
        )
    # As the client writes it for a branch, which it was not asked for here; under the commit's own
    # name it says that `meta` is whole.
    for name in (target.revision, commit):
        (refs / name).parent.mkdir(parents=True, exist_ok=True)
        (refs / name).write_text(commit)
    return config.at(commit)


def locate_on_ranks(config: DatasetConfig) -> DatasetConfig:
    """Collective: every rank. `located` on the main rank, for all.

    Raises:
        PublishError: as above, the same on every rank.
    """
    if config.repo_id is None:
        return config.rooted()
    return on_main_at_leisure(lambda: located(config))


def fetch_frames(
    config: DatasetConfig,
    metadata: Metadata,
    cameras: Iterable[str],
    held_out: EvalConfig,
) -> None:
    """Collective: every rank. Fetch the files of the chosen episodes and of `cameras`.

    `cameras` have the policy's names. Files that are here already are not asked for.

    Raises:
        PublishError: they cannot be had, or the disk has no room for them; the same on every rank.
        ConfigError: this rank is on a machine that does not share the main rank's cache.
    """
    if config.repo_id is None or config.folder == lerobot_folder(config.repo_id):
        return
    stored = metadata.stored_names
    videos = [stored[name] for name in cameras if name in stored]
    numbers = [episode.number for episode in metadata.episodes]
    split = split_episodes(numbers, config, held_out)
    chosen = {*split.trained, *split.held_out}
    wanted: set[str] = set()
    for episode in metadata.episodes:
        if episode.number in chosen:
            wanted.add(episode.data_file)
            wanted |= {episode.videos[name].file for name in videos if name in episode.videos}
    on_main_at_leisure(lambda: _fetch(config, wanted))
    missing = sorted(file for file in wanted if not (config.folder / file).exists())
    if missing:
        raise ConfigError.of(
            "dataset.repo_id",
            f"= {config.repo_id!r}: {missing[0]} is missing in {config.folder} on "
            f"{os.uname().nodename}.",
            "If the main rank is on another machine, set HF_HOME to a folder that both share, or "
            f"run `hf download {config.repo_id} --repo-type dataset --revision {config.revision}` "
            "here.",
        )


def _fetch(config: DatasetConfig, wanted: Collection[str]) -> None:
    missing = {file for file in wanted if not (config.folder / file).exists()}
    if not missing:
        return
    target = _target(config)
    sizes = {file.path: file.size_bytes for file in list_files(target)}
    # A file that the Hub does not have either is named below.
    missing &= sizes.keys()
    total = sum(sizes[file] for file in missing)
    check_disk(config.folder, total, f"the files of {config.repo_id}")
    note(
        f"fetching {len(missing):,} files ({total / 1e6:,.1f} MB) of {config.repo_id}@"
        f"{target.revision} into {config.folder}"
    )
    # The client goes on with a file that broke off, and fetches several at once.
    download(target, allow=[glob.escape(file) for file in sorted(missing)])


def _target(config: DatasetConfig) -> Target:
    assert config.repo_id is not None
    return Target(repo_id=config.repo_id, revision=config.revision or "main", repo_type="dataset")


def _read(ref: Path) -> str:
    return ref.read_text().strip() if ref.is_file() else ""
