"""A rank that raises between agreements tells its peers why, so that no rank waits forever.

Inside forward and backward no rank can ask the others whether all is well. A failing rank writes
its error into the launch's store and raises. Its peers find their collective broken, or, where the
backend does not notice, are ended by a watching thread; either way they quote the error.

A rank that is killed tells nothing. The first rank whose collective breaks finds out who gives no
answer, and writes that into the store too. It stays until the others know it: their collectives may
break only when this rank ends, and the store may end with it.

Ranks that run other wrap units raise nothing at all: they wait in collectives that do not fit. The
watching threads find that from what each rank ran last.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from parallel_config import is_agreed
from parallel_engine.errors import PeerError
from parallel_engine.unit_order import UnitOrder, certain_difference

POLL_S = 0.5
HEARD_S = 5.0
"""How long a failing rank stays, so that its peers can read the store, which it may be hosting. A
peer that has not answered by then counts as gone."""
STALL_S = 60.0
"""How long no wrap unit runs before ranks look whether they ran the same ones."""
GRACE_S = 20.0
"""How long a peer's main thread may take to notice by itself before the process is ended."""
# What gloo, NCCL and torch's process groups say of a peer; an error of the model says other things.
_BROKEN = re.compile(
    r"/gloo/|NCCL|ProcessGroup|Timed out waiting|Connection (closed|reset|refused)|Broken pipe"
)


class Failures:
    """Watches for errors of the other ranks, and tells them this rank's.

    What is written for one error is never read for another one: each engine has its own part of the
    store, and begins a new part in it after each error that the caller has handled.

    Args:
        name: the same on every rank, and of this engine alone.
    """

    order: UnitOrder | None = None
    """Of the wrap units, once there are some."""

    def __init__(self, rank: int, world_size: int, name: str) -> None:
        self._rank, self._world_size = rank, world_size
        self._name, self._num_handled = name, 0
        self._store: Store | None = None
        self._left = threading.Event()
        self._heard: list[str] = []
        """What the watching thread has read: the first error, then who is lost."""
        if world_size > 1:
            self._begin()

    def _begin(self) -> None:
        base = dist.distributed_c10d._get_default_store()
        prefix = f"parallel_engine/failures/{self._name}/{self._num_handled}"
        self._store = PrefixStore(prefix, base)
        self._left = threading.Event()
        self._heard = []
        watch = (self._store, self._rank, self._world_size, self._left, self._heard)
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), *watch), daemon=True, name="peer-failures"
        )
        thread.start()
        # Also when the interpreter ends: a thread inside a store call then aborts the process.
        weakref.finalize(self, _stop, self._left, thread)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Around code without agreements: its error reaches the peers.

        An error that ranks have agreed on is known to all of them already, so it passes. A rank
        that enters again has handled its last error. All ranks must do so: one that does not is
        ended by its watching thread.

        Raises:
            PeerError: a collective broke because another rank had failed, or is gone.
        """
        if self._store is not None and self._left.is_set():
            self._num_handled += 1
            self._begin()
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            if self._store is None or self._left.is_set() or is_agreed(error):
                raise
            cause = self._tell(self._store, error)
            self._left.set()
            if cause is not None and _is_of_a_collective(error):
                raise PeerError(cause) from error
            raise

    def _tell(self, store: Store, error: Exception) -> str | None:
        """Publish the error, unless a peer was first; returns the text of the peer's failure.

        Waits until every peer has read it. A peer that does not answer is gone; then this rank's
        own error is only the collective that broke because of it.
        """
        mine = f"rank {self._rank} failed: {type(error).__name__}: {error}"
        first = None
        try:
            first = store.compare_set("error", "", mine).decode()
            if first == mine:
                print(f"parallel_engine: {mine}", file=sys.stderr, flush=True)
            store.set(f"heard/{self._rank}", "")
            store.set(f"broke/{self._rank}", "")
            if silent := self._waited_for(store, "heard", range(self._world_size)):
                found = f"{_ranks(silent)} no answer: killed, or cut off. First seen: {first}"
                return self._lost(store, found, silent)
            if first == mine and _is_broken(error):
                return self._late(store, mine)
        except RuntimeError:  # the store went with the rank that hosted it
            # That rank may leave as soon as the watching thread has read who is lost, while this
            # thread still waits to find it by itself.
            if first == mine:
                return self._heard[-1] if len(self._heard) > 1 else None
            gone = None if self._rank == 0 else "rank 0 is gone, and the launch's store with it"
            return self._heard[-1] if self._heard else gone
        return None if first == mine else self._heard[-1] if self._heard else first

    def _lost(self, store: Store, found: str, silent: Collection[int]) -> str:
        """Publish who is lost, and stay until the ranks that are left know it."""
        found = store.compare_set("lost", "", found).decode()
        store.set(f"knows/{self._rank}", "")
        left = [rank for rank in range(self._world_size) if rank not in silent]
        self._waited_for(store, "knows", left)
        return found

    def _late(self, store: Store, mine: str) -> str:
        """Who has not come to the collective in which this rank has waited too long."""
        late = self._waited_for(store, "broke", range(self._world_size))
        if not late:
            return f"a collective broke on every rank. First seen: {mine}"
        who = "ranks " + str(late) if len(late) > 1 else f"rank {late[0]}"
        found = f"{who} did not come to a collective in time: late, or stuck. First seen: {mine}"
        return self._lost(store, found, ())

    def _waited_for(self, store: Store, what: str, ranks: Collection[int]) -> list[int]:
        """Those of `ranks` that have not said `what` within `HEARD_S`."""
        deadline = time.monotonic() + HEARD_S
        while silent := [rank for rank in ranks if not store.check([f"{what}/{rank}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return silent


def _ranks(silent: list[int]) -> str:
    return f"ranks {silent} give" if len(silent) > 1 else f"rank {silent[0]} gives"


def _is_broken(error: BaseException | None) -> bool:
    """Whether the error is certainly that of a collective, by its class or by its words."""
    if error is None:
        return False
    says_so = type(error) is RuntimeError and _BROKEN.search(str(error)) is not None
    return says_so or isinstance(error, dist.DistError) or _is_broken(error.__cause__)


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Whether a peer that is gone may be the reason. Running out of memory has its own class.

    The cause counts too: the save of a checkpoint makes its own error of such a one.
    """
    if error is None:
        return False
    broken = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return broken or _is_of_a_collective(error.__cause__)


def _watch(
    owner: weakref.ref[Failures],
    store: Store,
    rank: int,
    world_size: int,
    left: threading.Event,
    heard: list[str],
) -> None:
    """Run until `left` is set. A peer's error ends the process unless `left` is set soon after."""
    stall = _Stall(store, rank, world_size)
    while not left.wait(POLL_S):
        try:
            failures = owner()
            if failures is not None and failures.order is not None:
                stall.look(failures.order)
            del failures
            if not store.check(["error"]):
                continue
            heard.append(store.get("error").decode())
            store.set(f"heard/{rank}", "")
        except RuntimeError:
            return
        if not _left_within_grace(store, rank, left, heard):
            print(f"parallel_engine: rank {rank} ends: {heard[-1]}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        return


def _left_within_grace(store: Store, rank: int, left: threading.Event, heard: list[str]) -> bool:
    """Whether the main thread notices by itself; reads meanwhile who is lost."""
    deadline = time.monotonic() + GRACE_S
    while (remaining := deadline - time.monotonic()) > 0:
        if left.wait(min(POLL_S, remaining)):
            return True
        # Without a store, which went with its rank, there is nothing more to read.
        with contextlib.suppress(RuntimeError):
            if len(heard) == 1 and store.check(["lost"]):
                heard.append(store.get("lost").decode())
                store.set(f"knows/{rank}", "")
    return False


class _Stall:
    """Finds out whether ranks that stand still ran other wrap units, and makes that the error."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._mine = store, f"progress/{rank}"
        self._ranks = [f"progress/{rank}" for rank in range(world_size)]
        self._seen: tuple[int, list[str]] = (0, [])
        self._since = time.monotonic()

    def look(self, order: UnitOrder) -> None:
        progress = order.progress()
        if progress != self._seen:
            self._seen, self._since = progress, time.monotonic()
        elif progress[1] and time.monotonic() - self._since > STALL_S:
            self._since = time.monotonic()
            self._store.set(self._mine, json.dumps(progress))
            found = [
                self._store.get(r) if self._store.check([r]) else b"[-1, []]" for r in self._ranks
            ]
            if text := certain_difference([json.loads(p) for p in found]):
                self._store.compare_set("error", "", text)


def _stop(left: threading.Event, thread: threading.Thread) -> None:
    left.set()
    if thread is not threading.current_thread():
        thread.join(timeout=2 * POLL_S)
