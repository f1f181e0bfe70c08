"""Which checkpoints may go: pure functions over step numbers."""

from __future__ import annotations

from collections.abc import Collection


def superseded(
    steps: Collection[int],
    *,
    keep_last: int | None,
    keep_every: int | None,
    protected: Collection[int] = (),
) -> list[int]:
    """Steps to delete, in rising order; nothing goes while `keep_last` is None.

    The `keep_last` highest steps stay, as do multiples of `keep_every` and `protected` ones (what
    `last` points at, and what was just written).
    """
    if keep_last is None:
        return []
    newest = set(sorted(steps)[-keep_last:])
    return [
        step
        for step in sorted(steps)
        if step not in newest
        and step not in protected
        and not (keep_every and step % keep_every == 0)
    ]
