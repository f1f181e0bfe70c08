"""What can be kept of a tensor, decided before anything is written: the writer's side of limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.dtypes import TORCH_ITEM_BYTES, is_shape
from parallel_ckpt.formats.limits import MAX_DIMS, require_name, shown
from parallel_ckpt.state.shards import Shard
from parallel_config import Problem

MAX_LISTED = 10


def savable(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """The shards with their values as bytes in memory; no collective, and hardly ever a copy.

    Raises:
        CheckpointError: a reader could not give a tensor back; names each of them.
    """
    problems = [problem for name, shard in shards.items() for problem in _problems(name, shard)]
    if problems:
        raise CheckpointError(problems[:MAX_LISTED])
    return {name: _resolved(shard) for name, shard in shards.items()}


def _problems(name: str, shard: Shard) -> Iterator[Problem]:
    try:
        require_name(name)
    except CheckpointError as error:
        yield from error.problems
        return
    dtype = str(shard.local.dtype).removeprefix("torch.")
    if dtype not in TORCH_ITEM_BYTES:
        yield Problem(name, f"has dtype {dtype}, which checkpoints cannot hold.", "Cast it.")
    if not is_shape(shard.shape):
        yield Problem(
            name,
            f"has shape {shown(shard.shape)}, but checkpoints hold tensors of up to {MAX_DIMS} "
            "dims, whose sizes multiply to less than 2^62.",
        )
    if shard.local.is_meta:
        yield Problem(name, "is on meta, so it does not have values.", "Materialize the model.")


def _resolved(shard: Shard) -> Shard:
    """In memory that holds the values: the bytes of a conjugated or negated view are others."""
    local = shard.local
    if local.is_conj() or local.is_neg():
        return shard.with_local(local.resolve_conj().resolve_neg())
    return shard
