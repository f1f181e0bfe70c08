"""Folders of work in progress, of which dead processes leave no more than the next one removes."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder of our own, locked while we live."""
    while True:
        folder = parent / f"{prefix}{uuid.uuid4().hex[:12]}"
        folder.mkdir()
        try:
            with _locked(folder) as is_ours:
                # Another process may have locked it first and removed it as one of the dead.
                if is_ours and folder.exists():
                    yield folder
                    return
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear(parent: Path, prefix: str) -> list[Path]:
    """Remove the temporary folders of dead conversions; the paths of those that are gone."""
    gone = []
    for leftover in parent.glob(f"{_literal(prefix)}*"):
        # What another user left may be closed to us: it stays.
        with suppress(PermissionError), _locked(leftover) as is_ours:
            if is_ours:
                shutil.rmtree(leftover, ignore_errors=True)
                if not leftover.exists():
                    gone.append(leftover)
    return gone


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder against other conversions; false when another one holds or removes it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _literal(name: str) -> str:
    """A name as a glob pattern that matches just it."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)
