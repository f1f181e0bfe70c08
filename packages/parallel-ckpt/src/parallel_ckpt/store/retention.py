"""Which checkpoints may go: pure functions over when each was committed, and after which one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Commit(NamedTuple):
    """Where a checkpoint stands in the history of its run."""

    sequence: int
    """Counts the commits of a run."""
    parent: int | None
    """`sequence` of the checkpoint that the run went on from; None where that is not known."""


def line_of_descent(commits: Mapping[int, Commit], step: int) -> list[int]:
    """The checkpoint of `step` and its ancestors, newest first.

    Where a parent was deleted, or is not known (format_version 1), the line goes on with the
    newest earlier commit of a lower step: rather one checkpoint too many than one too few.
    """
    line = [step]
    while True:
        sequence, parent = commits[line[-1]]
        limit = sequence - 1 if parent is None else parent
        earlier = [
            other
            for other, commit in commits.items()
            if commit.sequence == parent or (commit.sequence <= limit and other < line[-1])
        ]
        if not earlier:
            return line
        line.append(max(earlier, key=lambda other: commits[other].sequence))


def superseded(
    commits: Mapping[int, Commit],
    *,
    newest: int,
    keep_last: int | None,
    keep_every: int | None,
    protected: Collection[int] = (),
) -> list[int]:
    """Steps to delete, in rising order, those that `newest` does not descend from first.

    Nothing goes while `keep_last` is None. The `keep_last` newest of the line of descent of
    `newest` stay. What the run turned away from when it was taken up from an earlier step counts
    for nothing, whatever its steps. Multiples of `keep_every` and
    `protected` steps (what `last` points at) stay in any case.
    """
    if keep_last is None:
        return []
    line = line_of_descent(commits, newest)
    kept = {*line[:keep_last], *protected}
    doomed = [
        step for step in commits if step not in kept and not (keep_every and step % keep_every == 0)
    ]
    return sorted(doomed, key=lambda step: (step in line, step))
