"""Reads the plain files of the checkpoint that a run continues from: config and manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt import CheckpointError, RunFolder, StepFolder, read_manifest, resolve_checkpoint
from parallel_ckpt.store.find import newest_first
from parallel_ckpt.store.integrity import file_problems
from parallel_ckpt.store.manifest import Manifest
from parallel_config.codec import Loaded
from parallel_train.config import TrainConfig, read_config

Stamp = tuple[int, int]
"""Inode and time of a manifest: a save writes a new file, also for the same step."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint's config and manifest. Flags are parsed over it, and the start is decided by it.

    It is read when the command line is, and again only where the checkpoint is another one by then.
    """

    step: StepFolder
    loaded: Loaded[TrainConfig]
    """Its config, and what reading it left out."""
    manifest: Manifest
    stamp: Stamp

    @classmethod
    def read(
        cls, step: StepFolder, *, repeated_type: str | None, manifest: Manifest | None = None
    ) -> SavedRun:
        """Read both files; `repeated_type` as for `read_config`. `manifest` has been read already.

        Raises:
            ConfigError: one of them is missing or damaged.
        """
        stamp = _stamp(step)  # first: a file that is replaced meanwhile must count as another one
        loaded = read_config(step.train_config, trusted=False, repeated_type=repeated_type)
        manifest = manifest or read_manifest(step)
        return cls(step=step, loaded=loaded, manifest=manifest, stamp=stamp)

    def is_of(self, checkpoint: Path) -> bool:
        """Whether this is that checkpoint, and no save has replaced it since it was read."""
        # Resolved: `last` is a link to the step folder.
        is_same = self.step.path.resolve() == checkpoint.resolve()
        return is_same and self.stamp == _stamp(self.step)


def find_config(path: str) -> tuple[StepFolder, Manifest | None]:
    """The checkpoint that `path` means; of a run folder, the newest one with an intact config.

    Only the config is compared with its checksum here, and the other files later: a number that was
    damaged in the config would be taken for what the user wants. None stands for a manifest or a
    config that is damaged, where no other is intact.

    Raises:
        ConfigError: there is no checkpoint.
    """
    newest = StepFolder(resolve_checkpoint(path))
    run = RunFolder(Path(path).expanduser().absolute())
    steps = [newest]
    if run.checkpoints.is_dir():
        # Older ones only where a run was named, not one checkpoint of it.
        steps += [StepFolder(p) for p in newest_first(run) if p.resolve() != newest.path.resolve()]
    # Lazily: mostly the first is intact, and no other file is read.
    found = ((step, _of_intact_config(step)) for step in steps)
    return next((pair for pair in found if pair[1] is not None), (newest, None))


def _of_intact_config(step: StepFolder) -> Manifest | None:
    """The manifest, if the config of the checkpoint is what it says."""
    try:
        manifest = read_manifest(step)
    except CheckpointError:
        return None
    name = step.train_config.relative_to(step.path).as_posix()
    records = [record for record in manifest.files if record.path == name]
    is_intact = bool(records) and not list(file_problems(step, records, "full"))
    return manifest if is_intact else None


def _stamp(step: StepFolder) -> Stamp:
    try:
        facts = step.manifest.stat()
    except OSError:
        return 0, 0
    return facts.st_ino, facts.st_mtime_ns
