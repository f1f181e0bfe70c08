"""Checkpoints of any torch model that can be trusted, and resumed on any number of ranks.

with CheckpointSaver("run", topology=topology) as saver:
    saver.save(step=500, samples_seen=32000, model=model, optimizer=optimizer)

start = read_start("run", topology=topology)      # before the model is wrapped
restore(start.path, model, optimizer, scheduler)  # after
start.restore_rng()                               # before the first micro-batch
"""

from typing import TYPE_CHECKING, Any

from parallel_ckpt.errors import CheckpointError as CheckpointError
from parallel_ckpt.errors import CheckpointNotFound as CheckpointNotFound
from parallel_ckpt.errors import DamagedCheckpoint as DamagedCheckpoint
from parallel_ckpt.errors import StateMismatch as StateMismatch
from parallel_ckpt.layout import RunFolder as RunFolder
from parallel_ckpt.layout import StepFolder as StepFolder
from parallel_ckpt.store.find import newest_intact as newest_intact
from parallel_ckpt.store.find import resolve_checkpoint as resolve_checkpoint
from parallel_ckpt.store.manifest import FORMAT_VERSION as FORMAT_VERSION
from parallel_ckpt.store.manifest import Manifest as Manifest
from parallel_ckpt.store.manifest import read_manifest as read_manifest
from parallel_ckpt.store.mend import mend_run as mend_run

if TYPE_CHECKING:
    from parallel_ckpt.load.resume import Restored as Restored
    from parallel_ckpt.load.resume import Start as Start
    from parallel_ckpt.load.resume import read_start as read_start
    from parallel_ckpt.load.resume import restore as restore
    from parallel_ckpt.load.weights import load_weights as load_weights
    from parallel_ckpt.save.safetensors import save_weights as save_weights
    from parallel_ckpt.save.saver import CheckpointSaver as CheckpointSaver

# These need torch, whose import takes seconds: looking at a checkpoint does not wait for it.
_WITH_TORCH = {
    "Restored": "load.resume",
    "Start": "load.resume",
    "load_weights": "load.weights",
    "read_start": "load.resume",
    "restore": "load.resume",
    "CheckpointSaver": "save.saver",
    "save_weights": "save.safetensors",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"parallel_ckpt.{_WITH_TORCH[name]}"), name)
