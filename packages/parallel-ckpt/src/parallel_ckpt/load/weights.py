"""Weights alone into a model: out of a checkpoint, or of files that others wrote."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from parallel_ckpt.formats.tensor_files import safetensors_in
from parallel_ckpt.layout import DCP, DCP_METADATA, StepFolder
from parallel_ckpt.load.fill import fill_all, match, refuse_untied
from parallel_ckpt.load.sources import Source, dcp_source, safetensors_source, weights_of
from parallel_ckpt.ranks import Ranks, all_ranks
from parallel_ckpt.state.model import aliases, model_shards
from parallel_ckpt.state.shards import Shard
from parallel_ckpt.store.contents import Contents
from parallel_ckpt.store.find import committed_around, resolve_checkpoint, verify_on_all
from parallel_ckpt.store.integrity import Verify


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    allow_cast: bool = False,
    verify: Verify | None = None,
) -> int:
    """Collective: every rank. Fill a model's parameters and buffers in place; how many there were.

    `path` is anything `resolve_checkpoint` understands, or any folder or file of safetensors
    weights, or a DCP folder keyed by FQN. With `allow_cast` narrower dtypes are accepted. As in
    `restore` checksums are compared only with `verify`; without a checkpoint there are not any.

    Raises:
        StateMismatch: as for `restore`; nothing has been changed then.
        DamagedCheckpoint: as for `restore`.
        CheckpointNotFound: with `verify`: these weights do not lie in a checkpoint.
    """
    return _load_weights(model, path, all_ranks("load_weights"), allow_cast, verify)


def load_weights_alone(
    model: nn.Module, path: str | Path, *, allow_cast: bool = False, verify: Verify | None = None
) -> int:
    """As `load_weights`, but no collective: each process that calls it reads for itself.

    Raises:
        StateMismatch, DamagedCheckpoint, CheckpointNotFound: as for `load_weights`.
    """
    return _load_weights(model, path, Ranks(), allow_cast, verify)


def _load_weights(
    model: nn.Module, path: str | Path, ranks: Ranks, allow_cast: bool, verify: Verify | None
) -> int:
    where = Path(ranks.from_main(lambda: str(_weights_at(path))))

    if verify is not None:
        step = ranks.from_main(lambda: str(resolve_checkpoint(where)))
        verify_on_all(StepFolder(Path(step)), verify, ranks)

    def plan() -> tuple[Source, dict[str, Shard], dict[str, str]]:
        source, weights = _open(where), model_shards(model)
        tied = aliases(model)
        keys = match(source.tensors, weights, tied, where="weights", allow_cast=allow_cast)
        refuse_untied(source, weights, tied, keys, where="weights")
        return source, weights, keys

    source, weights, keys = ranks.together(plan)
    ranks.together(lambda: fill_all(source, weights, keys))
    return len(weights)


def _weights_at(path: str | Path) -> Path:
    """What `load_weights` reads: a step folder, its `dcp`, or weights outside of any checkpoint."""
    given = Path(path).expanduser().absolute()
    if given.is_file() and given.suffix == ".safetensors":
        return given
    if (step := committed_around(given)) is not None:
        return step.dcp if given.resolve() == step.dcp else step.path
    if given.is_dir() and (any(given.glob("*.safetensors")) or (given / DCP_METADATA).is_file()):
        return given
    return resolve_checkpoint(given)


def _open(where: Path) -> Source:
    """`where` is as `_weights_at` found it."""
    if where.is_file():
        return safetensors_source(where)
    if (step := committed_around(where)) is not None:
        contents = Contents.read(step)
        return dcp_source(where, contents) if where == step.dcp else weights_of(contents)
    # Weight files by name come first, as in a checkpoint. Other safetensors files come last: they
    # may be a processor's, beside weights that are in DCP.
    if not safetensors_in(where)[0]:
        for folder in (where / DCP, where):
            if (folder / DCP_METADATA).is_file():
                return dcp_source(folder)
    return safetensors_source(where)
