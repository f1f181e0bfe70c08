"""Every state that a power cut may leave, up to a stated bound."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel_testing.power_loss.calls import Call
from parallel_testing.power_loss.disk import ROOT, Disk, Node, Tree

BLOCK = 512
"""Bytes that a disk writes as a whole."""
KEPT = 0
VARIANTS = 6
"""Of a file that was not flushed: 0 is all that was written."""


@dataclass(frozen=True)
class Bound:
    """Which states are made after each call, out of all that the model allows.

    Always: everything pending is on disk; nothing is; all but one operation on names; that alone.
    """

    torn: bool = True
    """One file that was not flushed is lost or torn in each way, among all others and alone."""
    subsets: int = 8
    """All subsets of pending operations on names where there are at most this many."""
    samples: int = 0
    """Random combinations after each call."""
    seed: int = 0


@dataclass(frozen=True)
class State:
    """A tree that may be found after the power comes back."""

    after: int
    """Calls made before the cut."""
    tree: Tree
    digest: bytes
    """Of the tree."""


Choice = tuple[frozenset[int], dict[int, int]]
"""Numbers of the pending operations that are on disk, and of files another variant than KEPT."""


def crash_states(calls: Sequence[Call], bound: Bound) -> Iterator[State]:
    """The states after each prefix of the calls; one that was given after this prefix is left out.

    Raises:
        OSError: a call is impossible after those before it.
    """
    disk, generator = Disk(), random.Random(bound.seed)
    for index, call in enumerate(calls):
        disk.apply(call)
        seen: set[bytes] = set()
        views = _Views(disk)
        for choice in _choices(disk, bound, generator):
            state = views.state(index + 1, *choice)
            if state.digest not in seen:
                seen.add(state.digest)
                yield state


def variant(node: Node, which: int) -> bytes:
    """What may be on disk of a file that was written and not flushed since."""
    new, old = node.content, node.durable
    middle = len(new) // 2 // BLOCK * BLOCK
    under = old[: len(new)].ljust(len(new), b"\0")
    return (
        new,
        old,
        b"\0" * len(new),  # its size is there, its data is not
        new[:middle],  # a part, and the size of that part
        new[:middle] + under[middle:],  # the first blocks
        under[: max(middle, BLOCK)] + new[max(middle, BLOCK) :],  # the last blocks
    )[which]


def _choices(disk: Disk, bound: Bound, generator: random.Random) -> Iterator[Choice]:
    names = [operation.number for operation in disk.pending]
    files = disk.dirty_files()
    everything, lost = frozenset(names), dict.fromkeys(files, 1)
    yield everything, {}
    yield frozenset(), lost
    for number in names:
        yield everything - {number}, {}
        yield frozenset([number]), lost
    if bound.torn:
        for file in files:
            for which in range(1, VARIANTS):
                yield everything, {file: which}
                yield everything, {**lost, file: which}
            yield everything, {**lost, file: KEPT}
    if len(names) <= bound.subsets:
        for count in range(len(names) + 1):
            for kept in itertools.combinations(names, count):
                yield frozenset(kept), {}
                yield frozenset(kept), lost
    for _ in range(bound.samples):
        share = generator.random()
        kept_names = frozenset(number for number in names if generator.random() < share)
        yield kept_names, {file: generator.randrange(VARIANTS) for file in files}


class _Views:
    """Trees of one disk; contents of files are made and hashed once."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._contents: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def state(self, after: int, kept: frozenset[int], variants: dict[int, int]) -> State:
        overlay: dict[int, dict[str, tuple[int, int | None]]] = {}
        there: set[int] = set()
        pending = {operation.number for operation in self._disk.pending}
        for operation in self._disk.pending:
            is_after = operation.after is None or operation.after not in pending
            if operation.number not in kept or not (is_after or operation.after in there):
                continue
            there.add(operation.number)
            for folder, name, node in operation.cells:
                overlay.setdefault(folder, {})[name] = (operation.number, node)
        tree: dict[str, bytes | str | None] = {}
        hasher = hashlib.blake2b(digest_size=16)
        self._walk(ROOT, "", overlay, variants, tree, hasher)
        return State(after, tree, hasher.digest())

    def _walk(
        self,
        folder: int,
        prefix: str,
        overlay: dict[int, dict[str, tuple[int, int | None]]],
        variants: dict[int, int],
        tree: dict[str, bytes | str | None],
        hasher: hashlib.blake2b,
    ) -> None:
        cells = dict(self._disk.nodes[folder].cells)
        for name, cell in overlay.get(folder, {}).items():
            if cells.get(name, (-1, None))[0] < cell[0]:
                cells[name] = cell
        for name in sorted(cells):
            number = cells[name][1]
            if number is None:
                continue
            node, path = self._disk.nodes[number], prefix + name
            hasher.update(f"{node.kind} {path}\0".encode())
            if node.kind == "folder":
                tree[path] = None
                self._walk(number, path + "/", overlay, variants, tree, hasher)
            elif node.kind == "link":
                tree[path] = node.text
                hasher.update(node.text.encode())
            else:
                which = variants.get(number, KEPT) if node.is_dirty else KEPT
                content, digest = self._content(number, node, which)
                tree[path] = content
                hasher.update(digest)

    def _content(self, number: int, node: Node, which: int) -> tuple[bytes, bytes]:
        key = (number, which)
        if key not in self._contents:
            content = variant(node, which)
            self._contents[key] = (content, hashlib.blake2b(content, digest_size=16).digest())
        return self._contents[key]
