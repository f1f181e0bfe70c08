"""Which checkpoints may go: a pure function over when they were committed."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def superseded(
    sequences: Mapping[int, int],
    *,
    keep_last: int | None,
    keep_every: int | None,
    protected: Collection[int] = (),
) -> list[int]:
    """Steps to delete, in rising order; nothing goes while `keep_last` is None.

    `sequences` counts commits: it gives each step its manifest's `sequence`. The `keep_last` that
    were committed last stay, whatever their steps: a run that was taken up again from an earlier
    step would else lose what it has just saved to the checkpoints that it turned away from. So do
    multiples of `keep_every` and `protected` steps (what `last` points at, what was just written).
    """
    if keep_last is None:
        return []
    newest = sorted(sequences, key=lambda step: (sequences[step], step))[-keep_last:]
    return [
        step
        for step in sorted(sequences)
        if step not in newest
        and step not in protected
        and not (keep_every and step % keep_every == 0)
    ]
