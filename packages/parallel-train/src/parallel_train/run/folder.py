"""The files of one run: what lies where, and whether it may be written."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from parallel_config import ConfigError, Problem


@dataclass(frozen=True)
class RunFiles:
    """Paths of a run's own files; checkpoints below it belong to `parallel_ckpt`."""

    path: Path

    @property
    def train_config(self) -> Path:
        """The config with resolved degrees, as the run uses it."""
        return self.path / "train_config.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per optimizer update."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the step folders."""
        return self.path / "checkpoints"

    @property
    def last(self) -> Path:
        """Link to the newest checkpoint."""
        return self.checkpoints / "last"

    def holds_run(self) -> bool:
        """Whether a run was started here before."""
        return self.train_config.exists() or self.checkpoints.exists()

    def create(self, dataset: Path | None = None) -> None:
        """Make the folder and prove that it can be written.

        Raises:
            ConfigError: it is a file, cannot be made or written, or lies in the folder `dataset`.
        """
        # A run's files would become a part of the dataset, and are sent to the Hub with it.
        if dataset is not None and self.path.resolve().is_relative_to(dataset.resolve()):
            raise ConfigError(
                Problem(
                    "output_dir",
                    f"= {str(self.path)!r} lies in the dataset {str(dataset)!r}.",
                    "Use --output_dir with a folder outside of it.",
                )
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Permissions alone do not tell: a file system may be read-only or full.
            probe = self.path / f".write-test-{os.getpid()}"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                Problem(
                    "output_dir",
                    f"= {str(self.path)!r} cannot be written: {error.strerror}.",
                    "Use --output_dir with a folder that can.",
                )
            ) from error

    def write_config(self, text: str) -> None:
        """Replace `train_config.json` in one move."""
        # A reader, or a start after a crash, sees the old text or the new one, never half of one.
        temporary = self.train_config.with_suffix(".json.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.train_config)

    def begin(self, config: str, step: int, *, keep_former: bool) -> None:
        """Bring the files to the state of `step`, from which the run is about to train.

        `keep_former` keeps the config that was there under another name: it knows keys that the new
        one has lost.
        """
        if keep_former:
            self._keep_config(step)
        self.write_config(config)
        self.drop_metrics_after(step)

    def _keep_config(self, step: int) -> None:
        if self.train_config.exists():
            kept = self.path / f"train_config.until-{step:06d}.json"
            shutil.copyfile(self.train_config, kept)

    def drop_metrics_after(self, step: int) -> None:
        """Remove lines of updates that a resumed run is about to repeat.

        A line that was cut short by a crash goes as well.
        """
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                # Later lines belong to updates that are about to be made again.
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        temporary = self.metrics.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.metrics)


def default_output_dir(policy: str) -> str:
    """Make `outputs/<time>_<policy>`, or `..._2` and so on: a folder for a run that was given none.

    Runs that start in the same second get a folder each: only one process can make a folder. It
    goes again at the end of the process where nothing was written into it.
    """
    name = policy.rpartition(":")[2] or policy
    first = f"outputs/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"
    path = first
    for count in itertools.count(2):
        try:
            Path(path).mkdir(parents=True)
        except FileExistsError:
            path = f"{first}_{count}"
            continue
        except OSError:  # the run names the folder that it cannot write to
            return path
        atexit.register(_remove_empty, path)
        return path
    raise AssertionError("the names never end")


def _remove_empty(path: str) -> None:
    with contextlib.suppress(OSError):
        os.removedirs(path)  # it is relative, so that nothing above `outputs` goes
