"""Every state that a power cut may leave, up to a stated bound."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel_testing.power_loss.calls import Call
from parallel_testing.power_loss.disk import ROOT, Disk, Node, Tree
from parallel_testing.power_loss.torn import KEPT, LOST, Torn, content_of, random_torn, torn_ways


@dataclass(frozen=True)
class Bound:
    """Which states are made after each call, out of all that the model allows.

    Always: everything pending is on disk; nothing is; all but one operation on names; that alone.
    """

    torn: bool = True
    """One file that was not flushed is lost or torn in each of `torn_ways`, among all others and
    alone."""
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
    parts: tuple[tuple[str, bytes], ...]
    """Each path of the tree with the digest of what it holds."""


Choice = tuple[frozenset[int], dict[int, Torn]]
"""Numbers of the pending operations that are on disk, and what there is of files not KEPT whole."""


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


def _choices(disk: Disk, bound: Bound, generator: random.Random) -> Iterator[Choice]:
    names = [operation.number for operation in disk.pending]
    files = disk.dirty_files()
    everything, lost = frozenset(names), dict.fromkeys(files, LOST)
    yield everything, {}
    yield frozenset(), lost
    for number in names:
        yield everything - {number}, {}
        yield frozenset([number]), lost
    if bound.torn:
        for file in files:
            for torn in torn_ways(disk.nodes[file]):
                yield everything, {file: torn}
                yield everything, {**lost, file: torn}
            yield everything, {**lost, file: KEPT}
    if len(names) <= bound.subsets:
        for count in range(len(names) + 1):
            for kept in itertools.combinations(names, count):
                yield frozenset(kept), {}
                yield frozenset(kept), lost
    for _ in range(bound.samples):
        share = generator.random()
        kept_names = frozenset(number for number in names if generator.random() < share)
        yield kept_names, {file: random_torn(disk.nodes[file], generator) for file in files}


class _Views:
    """Trees of one disk; contents of files are made and hashed once."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._contents: dict[tuple[int, Torn], tuple[bytes, bytes]] = {}
        self._known: dict[frozenset[int], list[tuple[str, int, Node]]] = {}

    def state(self, after: int, kept: frozenset[int], variants: dict[int, Torn]) -> State:
        tree: dict[str, bytes | str | None] = {}
        parts: list[tuple[str, bytes]] = []
        for path, number, node in self._names(kept):
            if node.kind == "folder":
                tree[path] = None
                parts.append((path, b"folder"))
            elif node.kind == "link":
                tree[path] = node.text
                parts.append((path, b"link " + node.text.encode()))
            else:
                torn = variants.get(number, KEPT) if variants and node.is_dirty else KEPT
                tree[path], digest = self._content(number, node, torn)
                parts.append((path, digest))
        text = b"".join(path.encode() + b"\0" + digest for path, digest in parts)
        return State(after, tree, hashlib.blake2b(text, digest_size=16).digest(), tuple(parts))

    def _names(self, kept: frozenset[int]) -> list[tuple[str, int, Node]]:
        """What lies where, folders before what they hold; made once for all the torn files."""
        if kept not in self._known:
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
            self._known[kept] = list(self._walk(ROOT, "", overlay))
        return self._known[kept]

    def _walk(
        self, folder: int, prefix: str, overlay: dict[int, dict[str, tuple[int, int | None]]]
    ) -> Iterator[tuple[str, int, Node]]:
        cells = dict(self._disk.nodes[folder].cells)
        for name, cell in overlay.get(folder, {}).items():
            if cells.get(name, (-1, None))[0] < cell[0]:
                cells[name] = cell
        for name in sorted(cells):
            number = cells[name][1]
            if number is None:
                continue
            node, path = self._disk.nodes[number], prefix + name
            yield path, number, node
            if node.kind == "folder":
                yield from self._walk(number, path + "/", overlay)

    def _content(self, number: int, node: Node, torn: Torn) -> tuple[bytes, bytes]:
        key = (number, torn)
        if key not in self._contents:
            content = content_of(node, torn)
            self._contents[key] = (content, hashlib.blake2b(content, digest_size=16).digest())
        return self._contents[key]
