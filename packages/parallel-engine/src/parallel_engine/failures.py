"""A rank that raises between agreements tells its peers why, and nobody waits for it for ever.

Inside forward and backward no rank can ask the others whether all is well. A failing rank writes
its error into the launch's store and raises. Its peers find their collective broken, or, where the
backend does not notice, are ended by a watching thread; either way they quote the error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

POLL_S = 0.5
HEARD_S = 5.0
"""How long a failing rank stays for its peers to read the store, which it may be hosting."""
GRACE_S = 20.0
"""How long a peer's main thread may take to notice by itself before the process is ended."""


class PeerError(RuntimeError):
    """Another rank failed first; the message quotes its error."""


class Failures:
    """An eye on the errors of the other ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._left = threading.Event()
        self._store: Any = None
        if world_size > 1:
            base = dist.distributed_c10d._get_default_store()
            self._store = dist.distributed_c10d.PrefixStore("parallel_engine/failures", base)
            thread = threading.Thread(target=self._watch, daemon=True, name="peer-failures")
            thread.start()
            # A thread inside a store call while the interpreter ends would abort the process.
            atexit.register(self._stop, thread)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Around code without agreements: its error reaches the peers.

        Raises:
            PeerError: a collective broke because another rank had failed.
        """
        try:
            yield
        except Exception as error:
            if self._store is None:
                raise
            first = self._tell(error)
            self._left.set()
            if first is not None and isinstance(error, RuntimeError):
                raise PeerError(first) from error
            raise

    def _tell(self, error: Exception) -> str | None:
        """Publish the error unless a peer was first; that peer's text."""
        mine = f"rank {self._rank} failed: {type(error).__name__}: {error}"
        try:
            first = self._store.compare_set("error", "", mine).decode()
            if first != mine:
                return str(first)
            print(f"parallel_engine: {mine}", file=sys.stderr, flush=True)
            deadline = time.monotonic() + HEARD_S
            while self._store.add("heard", 0) < self._world_size - 1:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        except RuntimeError:  # the store went with the rank that hosted it
            return None
        return None

    def _watch(self) -> None:
        while not self._left.wait(POLL_S):
            try:
                if not self._store.check(["error"]):
                    continue
                text = self._store.get("error").decode()
                self._store.add("heard", 1)
            except RuntimeError:
                return
            if not self._left.wait(GRACE_S):
                print(f"parallel_engine: rank {self._rank} ends: {text}", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)
            return

    def _stop(self, thread: threading.Thread) -> None:
        self._left.set()
        thread.join(timeout=2 * POLL_S)
