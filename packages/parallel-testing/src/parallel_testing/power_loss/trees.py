"""Trees as real files, made by links to contents that are written once."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from parallel_testing.power_loss.disk import Tree


class Blobs:
    """Contents by their hash in one folder; a tree costs one link per file.

    The files have the oldest time there is, so a lock among them counts as left long ago. Readers
    must not write into them: `changed` finds out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._known: dict[bytes, str] = {}

    def materialize(self, tree: Tree, folder: Path) -> None:
        """Make a tree in a folder, which is emptied first."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        root = str(folder)
        for path, content in tree.items():  # a folder comes before what it holds
            where = f"{root}/{path}"
            if content is None:
                os.mkdir(where)
            elif isinstance(content, str):
                os.symlink(content, where)
            else:
                os.link(self._blob(content), where)

    def changed(self) -> list[str]:
        """Names of contents that a reader has written into."""
        return [
            path.name
            for path in self.folder.iterdir()
            if hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() != path.name
        ]

    def _blob(self, content: bytes) -> str:
        found = self._known.get(content)
        if found is None:
            name = hashlib.blake2b(content, digest_size=16).hexdigest()
            found = self._known[content] = f"{self.folder}/{name}"
            Path(found).write_bytes(content)
            os.utime(found, (0, 0))
        return found


def read_tree(folder: Path) -> Tree:
    """What really lies in a folder."""
    tree: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            tree[name] = os.readlink(path)
        else:
            tree[name] = None if path.is_dir() else path.read_bytes()
    return tree
