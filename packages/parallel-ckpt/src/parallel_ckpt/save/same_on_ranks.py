"""What the ranks of one save must have alike, and what is said where they do not.

A checkpoint holds once what each rank has: step, position in the data, rates, buffers. The values
of one rank stand for all. So they are compared before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.hashing import hash_bytes
from parallel_ckpt.ranks import Ranks
from parallel_ckpt.save.snapshot import Snapshot
from parallel_ckpt.state.shards import Shard, signature


class Digests(NamedTuple):
    """Of one rank's snapshot. Few bytes: every rank gets those of all ranks."""

    tensors: str
    """Step, and names, shapes and dtypes of all tensors."""
    values: str
    buffers: str
    """Empty where they are not compared."""


def digests_of(snapshot: Snapshot, *, with_buffers: bool) -> Digests:
    """What `together_all` of the ranks is compared by. No collective."""
    shapes = signature(snapshot.weights), signature(snapshot.optimizer)
    buffers = _of_buffers(snapshot.weights) if with_buffers else {}
    return Digests(
        hash_bytes(repr((snapshot.step, shapes)).encode()),
        hash_bytes(repr(sorted(snapshot.values.items())).encode()),
        hash_bytes(repr(sorted(buffers.items())).encode()),
    )


def require_same(found: Sequence[Digests], snapshot: Snapshot, ranks: Ranks) -> None:
    """Collective: every rank. Raise where a value that is saved once differs between ranks.

    Raises:
        CheckpointError: names what differs, and the ranks.
    """
    if odd := _odd([digests.tensors for digests in found]):
        raise CheckpointError.of(
            "checkpoint",
            f"of step {snapshot.step}: ranks {odd} hold other tensors, or save another step, "
            "than rank 0.",
            "Build the same model and optimizer on every rank.",
        )
    odd = _odd([digests.values for digests in found])
    if not odd:
        return
    # Only now by name: it costs bytes on every rank, and every rank knows that it is needed.
    named = ranks.all_gather({name: hash_bytes(v) for name, v in snapshot.values.items()})
    differing = _differing(named)
    raise CheckpointError.of(
        ", ".join(differing),
        f"of ranks {odd} differs from that of rank 0, and a checkpoint holds it once.",
        "Give the same value on every rank. If each rank has its own value, gather them into one "
        "value first.",
    )


def differing_buffers(found: Sequence[Digests], snapshot: Snapshot, ranks: Ranks) -> list[str]:
    """Collective: every rank. Names of the buffers that are not alike on all ranks."""
    if not _odd([digests.buffers for digests in found]):
        return []
    return _differing(ranks.all_gather(_of_buffers(snapshot.weights)))


def line_about_buffers(names: Sequence[str]) -> str:
    """What a person should know and can do."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"buffers differ between ranks: {names[0]}{more}. Checkpoints hold those of rank 0. For "
        "statistics of the global batch use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), "
        "or average the buffers over the ranks before each save."
    )


def _of_buffers(weights: Mapping[str, Shard]) -> dict[str, str]:
    """Digests of the buffers that every rank holds whole; those that are cut differ by nature."""
    held = {n: shard for n, shard in weights.items() if shard.is_buffer and not shard.holders}
    return {name: _digest(shard.local) for name, shard in held.items()}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hash_bytes(flat.view(torch.uint8).numpy().tobytes())


def _odd(values: Sequence[str]) -> list[int]:
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _differing(named: Sequence[Mapping[str, str]]) -> list[str]:
    names = sorted({name for of_rank in named for name in of_rank})
    return [name for name in names if any(r.get(name) != named[0].get(name) for r in named)]
