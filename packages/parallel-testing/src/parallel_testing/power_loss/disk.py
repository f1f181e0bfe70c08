"""A disk that forgets: what is in memory, what is surely on disk, and what may be either.

Names are cells: (folder, name) holds a file, a folder, a link, or nothing. An operation on names
writes one cell, a rename two at once. Until the folder is flushed, the disk may have any of the
pending operations or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from parallel_testing.power_loss.calls import Call

ROOT = 0
_FORMER = 4
"""Contents that are kept of a file which is written again and again without a flush."""
Tree = Mapping[str, bytes | str | None]
"""What lies where: bytes of a file, text of a link, None for a folder."""


@dataclass
class Node:
    """A file, a folder or a link, whatever names it has."""

    kind: Literal["file", "folder", "link"]
    content: bytes = b""
    """Of a file, as processes see it."""
    durable: bytes = b""
    """Of a file, as it was last flushed."""
    former: list[bytes] = field(default_factory=list)
    """Of a file, what it held in between: a block may have gone to disk before the last write."""
    text: str = ""
    """Of a link; it is written with the link itself."""
    entries: dict[str, int] = field(default_factory=dict)
    """Of a folder, as processes see it."""
    cells: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """Of a folder, surely on disk: the number of the last operation and what it left."""

    @property
    def is_dirty(self) -> bool:
        """Whether a file holds what was not flushed."""
        return self.kind == "file" and self.content != self.durable


@dataclass(frozen=True)
class NameOperation:
    """A change of names that is on disk as a whole or not at all."""

    number: int
    cells: tuple[tuple[int, str, int | None], ...]
    """Folder, name, and what the name means from then on."""
    folder: int
    """The flush of this folder brings it to disk; of a rename, the folder of the new name."""
    after: int | None
    """An earlier operation that moved the same node: on disk whenever this one is."""


class Disk:
    """Starts with an empty root folder, which is on disk."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {ROOT: Node("folder")}
        self.pending: list[NameOperation] = []
        self._by_inode: dict[int, int] = {}
        self._number = 0
        self._moved: dict[int, int] = {}
        """Number of the last rename of a node."""
        self._aliases: dict[tuple[int, str], tuple[int, str]] = {}
        """Of renames that were taken out."""

    def apply(self, call: Call) -> None:
        """Do what a recorded call did.

        Raises:
            OSError: a file system would have refused it: calls before it were taken out.
        """
        if call.kind in ("write", "truncate", "fsync"):
            self._on_node(call)
        elif call.kind != "mark":
            self._on_names(call)

    def dirty_files(self) -> list[int]:
        """Files whose content is not flushed."""
        return [number for number, node in self.nodes.items() if node.is_dirty]

    def live(self) -> Tree:
        """The tree as processes see it."""
        tree: dict[str, bytes | str | None] = {}
        self._collect(ROOT, "", tree)
        return tree

    def _collect(self, folder: int, prefix: str, tree: dict[str, bytes | str | None]) -> None:
        for name, number in self.nodes[folder].entries.items():
            node, path = self.nodes[number], prefix + name
            tree[path] = {"file": node.content, "link": node.text, "folder": None}[node.kind]
            if node.kind == "folder":
                self._collect(number, path + "/", tree)

    def _on_node(self, call: Call) -> None:
        number = self._find(call)
        node = self.nodes[number]
        if call.kind != "fsync" and node.is_dirty and node.content:
            node.former = [*node.former, node.content][-_FORMER:]
        if call.kind == "write":
            held = node.content.ljust(call.offset, b"\0")
            node.content = held[: call.offset] + call.data + held[call.offset + len(call.data) :]
        elif call.kind == "truncate":
            node.content = node.content[: call.offset].ljust(call.offset, b"\0")
        elif node.kind == "folder":
            self._flush_folder(number)
        else:
            node.durable, node.former = node.content, []

    def _find(self, call: Call) -> int:
        if call.path == ".":
            return ROOT
        try:
            folder, name = self._existing(call.path)
            return self.nodes[folder].entries[name]
        except (FileNotFoundError, KeyError):
            # An open file whose name is gone.
            if call.inode not in self._by_inode:
                raise FileNotFoundError(call.path) from None
            return self._by_inode[call.inode]

    def _flush_folder(self, number: int) -> None:
        done = [operation for operation in self.pending if operation.folder == number]
        self.pending = [operation for operation in self.pending if operation.folder != number]
        for operation in done:
            for folder, name, node in operation.cells:
                cells = self.nodes[folder].cells
                if cells.get(name, (-1, None))[0] < operation.number:
                    cells[name] = (operation.number, node)

    def _on_names(self, call: Call) -> None:
        if call.kind in ("mkdir", "create", "symlink"):
            folder, name = self._parent(call.path)
            self._require(name not in self.nodes[folder].entries, FileExistsError, call)
            number = self._new(call)
            self.nodes[folder].entries[name] = number
            self._note(((folder, name, number),), folder)
            return
        folder, name = self._existing(call.path)
        self._require(name in self.nodes[folder].entries, FileNotFoundError, call)
        if call.kind == "remove":
            self._remove(call, folder, name)
        elif call.kind == "alias":
            self._aliases[self._parent(call.target)] = (folder, name)
        elif call.kind == "link":
            target, new = self._parent(call.target)
            self._require(new not in self.nodes[target].entries, FileExistsError, call)
            number = self.nodes[folder].entries[name]
            self.nodes[target].entries[new] = number
            self._note(((target, new, number),), target)
        else:
            self._rename(call, folder, name)

    def _remove(self, call: Call, folder: int, name: str) -> None:
        number = self.nodes[folder].entries[name]
        self._require(not self.nodes[number].entries, OSError, call)
        del self.nodes[folder].entries[name]
        self._note(((folder, name, None),), folder, number)

    def _rename(self, call: Call, folder: int, name: str) -> None:
        target, new = self._parent(call.target)
        others = self.nodes[target].entries
        # A rename does not replace a folder that holds something.
        is_free = new not in others or not self.nodes[others[new]].entries
        self._require(is_free, FileExistsError, call)
        number = self.nodes[folder].entries.pop(name)
        others[new] = number
        self._note(((folder, name, None), (target, new, number)), target, number)
        self._moved[number] = self._number

    def _new(self, call: Call) -> int:
        number = len(self.nodes)
        kinds: dict[str, Literal["file", "folder", "link"]]
        kinds = {"mkdir": "folder", "create": "file", "symlink": "link"}
        self.nodes[number] = Node(kinds[call.kind], text=call.target)
        if call.inode:
            self._by_inode[call.inode] = number
        return number

    def _note(
        self, cells: tuple[tuple[int, str, int | None], ...], folder: int, moved: int | None = None
    ) -> None:
        self._number += 1
        after = None if moved is None else self._moved.get(moved)
        self.pending.append(NameOperation(self._number, cells, folder, after))

    def _parent(self, path: str) -> tuple[int, str]:
        """The folder that a name lies in, and the name."""
        *folders, name = path.split("/")
        number = ROOT
        for part in folders:
            folder, known = self._meant(number, part)
            if known not in self.nodes[folder].entries:
                raise FileNotFoundError(path)
            number = self.nodes[folder].entries[known]
        return number, name

    def _existing(self, path: str) -> tuple[int, str]:
        return self._meant(*self._parent(path))

    def _meant(self, folder: int, name: str) -> tuple[int, str]:
        # A chain: what was renamed twice, without either.
        while name not in self.nodes[folder].entries and (folder, name) in self._aliases:
            folder, name = self._aliases[folder, name]
        return folder, name

    @staticmethod
    def _require(holds: bool, error: type[OSError], call: Call) -> None:
        if not holds:
            raise error(f"{call.kind} {call.path} {call.target}")


def replay(calls: Iterable[Call]) -> Disk:
    """The disk after all calls."""
    disk = Disk()
    for call in calls:
        disk.apply(call)
    return disk
