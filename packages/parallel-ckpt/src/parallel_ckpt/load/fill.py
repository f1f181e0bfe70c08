"""Filling shards from stored tensors that have been compared with them, whatever the format.

Each rank reads the bytes of its own boxes and nothing else, so that a rank never holds the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from parallel_ckpt.errors import DamagedCheckpoint, StateMismatch
from parallel_ckpt.formats.stored import StoredTensor
from parallel_ckpt.load.sources import Source, same_bits
from parallel_ckpt.state.shards import Shard
from parallel_ckpt.state.torch_dtypes import torch_dtype
from parallel_config import Problem

THREADS = 2
"""Threads that read, per rank: one copies while the other waits for the disk."""
MAX_LISTED = 10
"""Tensors listed by name in one error; the others are counted."""


def fill_all(source: Source, targets: Mapping[str, Shard], keys: Mapping[str, str]) -> None:
    """Fill every target from the stored tensor of its key. No collective.

    Raises:
        DamagedCheckpoint: what is stored does not cover a box.
    """
    wanted = [(keys.get(name, name), target) for name, target in targets.items()]
    wanted = [(key, target) for key, target in wanted if target.local.numel()]
    # In the order of the files' bytes: a disk that jumps back and forth is many times slower.
    wanted.sort(key=lambda item: source.position(item[0]))

    def fill(key: str, target: Shard) -> None:
        with torch.no_grad():  # its effect is limited to the thread that calls it
            found = source.fill(key, target)
        if found != target.local.numel():
            raise DamagedCheckpoint.of(key, f"has {found} of {target.local.numel()} values stored.")

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reading")
    try:
        for _ in pool.map(lambda item: fill(*item), wanted):
            continue
    finally:
        pool.shutdown(cancel_futures=True)
        source.close()


def match(
    source: Mapping[str, StoredTensor],
    targets: Mapping[str, Shard],
    aliases: Mapping[str, str],
    *,
    where: str,
    allow_cast: bool = False,
) -> dict[str, str]:
    """The stored key of each target that is stored under another name of a tied tensor.

    Raises:
        StateMismatch: lists tensors that are missing, unexpected, of another shape, on meta, or
            would lose precision.
    """
    other_names: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        other_names.setdefault(name, []).append(alias)
    keys = {
        name: next((a for a in other_names.get(name, ()) if a in source), name)
        for name in targets
        if name not in source
    }
    used = {keys.get(name, name) for name in targets}
    problems = [
        *_shape_problems(source, targets, keys, where, allow_cast),
        *(
            Problem(f"{where}: {name}", "is in the checkpoint, but not in what is loaded into.")
            for name in sorted(set(source) - used - set(aliases))
        ),
    ]
    if problems:
        raise StateMismatch(_shortened(problems, where))
    return keys


def refuse_untied(
    source: Source,
    targets: Mapping[str, Shard],
    aliases: Mapping[str, str],
    keys: Mapping[str, str],
    *,
    where: str,
) -> None:
    """Tensors that are one here must be one in the checkpoint: only one of them can be taken.

    `keys` are those of `match`. No collective; each rank compares the boxes that it holds.

    Raises:
        StateMismatch: lists tied names under which other values are stored.
    """
    problems = []
    for alias, name in sorted(aliases.items()):
        taken = keys.get(name, name)
        both = alias in source.tensors and taken in source.tensors and name in targets
        if both and alias != taken and not _same_values(source, alias, taken, targets[name]):
            problems.append(
                Problem(
                    f"{where}: {alias}",
                    f"is tied to {name} in the model, but other values are stored for it than for "
                    f"{taken}.",
                    "Build the model with these weights untied.",
                )
            )
    if problems:
        raise StateMismatch(_shortened(problems, where))


def _same_values(source: Source, one: str, other: str, target: Shard) -> bool:
    a, b = source.tensors[one], source.tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    filled = []
    for key in (one, other):
        memory = torch.zeros(target.local.shape, dtype=torch_dtype(a.dtype))
        source.fill(key, target.with_local(memory))
        filled.append(memory)
    return same_bits(*filled)


def _shape_problems(
    source: Mapping[str, StoredTensor],
    targets: Mapping[str, Shard],
    keys: Mapping[str, str],
    where: str,
    allow_cast: bool,
) -> Iterator[Problem]:
    for name, target in sorted(targets.items()):
        stored = source.get(keys.get(name, name))
        if stored is None:
            yield Problem(f"{where}: {name}", "is missing in the checkpoint.")
        elif stored.shape != target.shape:
            yield Problem(
                f"{where}: {name}", f"has shape {target.shape}, but {stored.shape} is stored."
            )
        elif target.local.is_meta:
            yield Problem(
                f"{where}: {name}",
                "is on meta, where it does not have memory to fill.",
                "Materialize the model first (engine.prepare does, with load_weights as its fill).",
            )
        elif not allow_cast and not keeps_precision(
            dtype := torch_dtype(stored.dtype), target.local.dtype
        ):
            yield Problem(
                f"{where}: {name}",
                f"has dtype {target.local.dtype}, which would lose precision of the stored "
                f"{dtype}.",
            )


def keeps_precision(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of one dtype has an equal one in the other."""
    if source == target:
        return True
    if source.is_complex or target.is_complex or torch.bool in (source, target):
        return False
    if source.is_floating_point and target.is_floating_point:
        a, b = torch.finfo(source), torch.finfo(target)
        return a.max <= b.max and a.eps >= b.eps and a.tiny >= b.tiny
    if source.is_floating_point or target.is_floating_point:
        return False
    low, high = torch.iinfo(source), torch.iinfo(target)
    return low.min >= high.min and low.max <= high.max


def _shortened(problems: list[Problem], where: str) -> list[Problem]:
    rest = len(problems) - MAX_LISTED
    if rest <= 0:
        return problems
    return [*problems[:MAX_LISTED], Problem(where, f"has {rest} more such tensors.")]
