"""One call that changes a file system, as it was made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal[
    "mkdir",
    "create",
    "symlink",
    "link",
    "rename",
    "remove",
    "write",
    "truncate",
    "fsync",
    "mark",
    "alias",
]
"""`remove` is unlink or rmdir. Two are not calls: with `mark` the caller notes what it was told;
`alias` stands for a rename that was taken out: from then on the new name means the old one."""


@dataclass(frozen=True)
class Call:
    """A call that succeeded. Paths are relative to the recorded root."""

    kind: Kind
    at: int
    """Nanoseconds of the machine's clock when it began: orders the calls of several processes."""
    path: str = ""
    """The name that it acts on; of `write`, `truncate` and `fsync` the name at that time."""
    target: str = ""
    """New path of `rename` and `link`, text of `symlink`, text of `mark`."""
    inode: int = 0
    """Number of the file or folder in the real file system; a number may be used again."""
    offset: int = 0
    """Of `write`; the new size of `truncate`."""
    data: bytes = b""
    site: str = ""
    """Function that asked for it, the innermost first."""


def merged(of_processes: Iterable[Iterable[Call]]) -> list[Call]:
    """The calls of several processes in the order in which they began.

    Writes that continue one another in a file become one call.
    """
    ordered = sorted((call for calls in of_processes for call in calls), key=lambda call: call.at)
    result: list[Call] = []
    for call in ordered:
        last = result[-1] if result else None
        if last is not None and _continues(last, call):
            result[-1] = replace(last, data=last.data + call.data)
        else:
            result.append(call)
    return result


def _continues(last: Call, call: Call) -> bool:
    return (
        last.kind == call.kind == "write"
        and last.inode == call.inode
        and last.offset + len(last.data) == call.offset
    )
