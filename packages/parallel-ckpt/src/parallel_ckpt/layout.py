"""Every file and folder name of a run: the only place that spells them.

<run>/run.lock
<run>/checkpoints/
    000500/
        manifest.json              written last: without it the folder is not a checkpoint
        pretrained_model/          config.json, train_config.json, model.safetensors or dcp/, ...
        training_state/            training_step.json, optimizer/, optimizer.json,
                                   scheduler.json, data.json, rng/rank_00000.safetensors, ...
    .000600.tmp-<id>/              a save under way, or what a dead one left
    .000500.old-<id>/              the former 000500 while a new one takes its place
    .000400.del-<id>/              a checkpoint on its way out
    last -> 000500
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS = "checkpoints"
LAST = "last"
MANIFEST = "manifest.json"
PRETRAINED_MODEL = "pretrained_model"
TRAINING_STATE = "training_state"
TRAIN_CONFIG = "train_config.json"
DCP = "dcp"
DCP_METADATA = ".metadata"
DCP_INDEX = "index.json"
SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
RUN_LOCK = "run.lock"
PROBE = ".shared-"
CONVERTING = ".converting-"
"""How the name of a conversion's folder begins while it is under way."""

TEMPORARY, REPLACED, DELETED = "tmp", "old", "del"
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_STEP = re.compile(r"\d{6,}")
_HIDDEN = re.compile(r"\.(\d{6,})\.(tmp|old|del)-[0-9a-z]+")


@dataclass(frozen=True)
class StepFolder:
    """Paths inside one checkpoint, whether committed or still under its temporary name."""

    path: Path

    @property
    def manifest(self) -> Path:
        """What the checkpoint holds; its presence is what makes a folder a checkpoint."""
        return self.path / MANIFEST

    @property
    def pretrained_model(self) -> Path:
        """Everything that using the model needs: config, weights, processors."""
        return self.path / PRETRAINED_MODEL

    @property
    def training_state(self) -> Path:
        """Everything else that resuming needs."""
        return self.path / TRAINING_STATE

    @property
    def dcp(self) -> Path:
        """Weights as DCP shards, keyed by FQN."""
        return self.pretrained_model / DCP

    @property
    def safetensors(self) -> Path:
        """Weights as one file; absent when they are split over several."""
        return self.pretrained_model / SAFETENSORS

    @property
    def safetensors_index(self) -> Path:
        """Which tensor lies in which file; absent when there is one file."""
        return self.pretrained_model / SAFETENSORS_INDEX

    @property
    def train_config(self) -> Path:
        """The run's config with resolved degrees."""
        return self.pretrained_model / TRAIN_CONFIG

    @property
    def training_step(self) -> Path:
        """Step, samples seen and the seed that fresh random streams derive from."""
        return self.training_state / "training_step.json"

    @property
    def optimizer(self) -> Path:
        """Tensors of the optimizer's state as DCP shards, keyed `state.<FQN>.<name>`."""
        return self.training_state / "optimizer"

    @property
    def optimizer_index(self) -> Path:
        """Parameter groups with their hyper-parameters, and the entries of each parameter."""
        return self.training_state / "optimizer.json"

    @property
    def scheduler(self) -> Path:
        """State of the learning-rate scheduler."""
        return self.training_state / "scheduler.json"

    @property
    def data(self) -> Path:
        """Position in the data, as the caller described it."""
        return self.training_state / "data.json"

    @property
    def rng_folder(self) -> Path:
        """Random states, one file per rank."""
        return self.training_state / "rng"

    def rng(self, rank: int) -> Path:
        """Random state of one rank."""
        return self.rng_folder / f"rank_{rank:05d}.safetensors"

    @property
    def is_committed(self) -> bool:
        """Whether this is a checkpoint to any reader."""
        return self.manifest.is_file()


@dataclass(frozen=True)
class Hidden:
    """A folder of a save, a replacement or a deletion that is under way or was cut short."""

    path: Path
    step: int
    role: str
    """`tmp`, `old` or `del`."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run, as far as checkpoints are concerned."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the step folders."""
        return self.path / CHECKPOINTS

    @property
    def last(self) -> Path:
        """Link to the newest checkpoint, or a one-line file where links are not to be had."""
        return self.checkpoints / LAST

    @property
    def lock(self) -> Path:
        """Says which process may write."""
        return self.path / RUN_LOCK

    def step(self, step: int) -> StepFolder:
        """Where the checkpoint of `step` lies once committed."""
        return StepFolder(self.checkpoints / step_name(step))

    def hidden(self, step: int, role: str, token: str) -> Path:
        """Where the folder of `step` lies in the given role; `token` makes the name unique."""
        return self.checkpoints / f".{step_name(step)}.{role}-{token}"

    def committed_steps(self) -> list[int]:
        """Steps of all committed checkpoints in rising order; empty without a folder."""
        if not self.checkpoints.is_dir():
            return []
        steps = (parse_step(entry.name) for entry in self.checkpoints.iterdir())
        return sorted({step for step in steps if step is not None and self._committed(step)})

    def hidden_folders(self) -> list[Hidden]:
        """Folders that are under way or were left behind, in rising order of step."""
        if not self.checkpoints.is_dir():
            return []
        found = ((entry, _HIDDEN.fullmatch(entry.name)) for entry in self.checkpoints.iterdir())
        hidden = [Hidden(path, int(match[1]), match[2]) for path, match in found if match]
        return sorted(hidden, key=lambda folder: (folder.step, folder.path.name))

    def _committed(self, step: int) -> bool:
        return self.step(step).is_committed


def step_name(step: int) -> str:
    """Folder name of a step: at least six digits, so that names sort as numbers do."""
    return f"{step:06d}"


def parse_step(name: str) -> int | None:
    """Inverse of `step_name`; None for any other name."""
    if not _STEP.fullmatch(name) or step_name(int(name)) != name:
        return None
    return int(name)


def step_of(name: str) -> int | None:
    """The step that a folder's name stands for, hidden ones included; None for any other name."""
    hidden = _HIDDEN.fullmatch(name)
    return int(hidden[1]) if hidden else parse_step(name)


def is_weight_file(name: str) -> bool:
    """Whether a file of `pretrained_model` holds the model's tensors.

    Any other safetensors file beside them is not the model's: a processor's, or an average's.
    """
    return _WEIGHT_FILE.fullmatch(name) is not None


def belongs_to_weights(name: str) -> bool:
    """Whether a file's name is reserved for the weights: a weight file, or their index."""
    return is_weight_file(name) or name == SAFETENSORS_INDEX


def rank_files(prefix: str, count: int) -> list[str]:
    """Names of `count` safetensors files of one model: `model-00001-of-00003.safetensors`."""
    return [f"{prefix}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
