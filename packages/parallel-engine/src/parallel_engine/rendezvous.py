"""Where the ranks of one launch find one another, also when the launch is a restart.

A launcher that restarts its workers keeps its store, and with it the addresses that the dead ones
left there. So the ranks agree on a name that was never used before, and put everything under it.
"""

from __future__ import annotations

import datetime
import re
import time
import uuid

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from parallel_config import ConfigError, Problem
from parallel_config.environment import LaunchFacts

POLL_S = 0.02
_SEE_WHAT_IT_PRINTED = (
    "See what the missing process printed; it may have failed at start, or never been started."
)


def meet(facts: LaunchFacts, timeout: datetime.timedelta) -> Store:
    """Collective: every rank. A store that all ranks of this launch share and that is new.

    Raises:
        ConfigError: the address is incomplete, taken or out of reach, or ranks did not arrive in
            time; names them.
    """
    store = _connect(facts, timeout)
    return fresh(store, facts.rank, facts.world_size, timeout)


def fresh(store: Store, rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """Collective: every rank. A part of `store` that is empty, whatever earlier ranks wrote.

    Each rank writes a name that it has just made up. Rank 0 answers each name with the one to use:
    an answer to a new name cannot be left over from an earlier launch.

    Raises:
        ConfigError: ranks did not arrive in time; names them.
    """
    meeting = PrefixStore("parallel_engine/meeting", store)
    mine = uuid.uuid4().hex
    if rank == 0:
        _answer(meeting, mine, world_size, timeout)
        return PrefixStore(f"parallel_engine/{mine}", store)
    meeting.set(f"hello/{rank}", mine)
    try:
        name = meeting.get(f"answer/{mine}").decode()
    except RuntimeError as error:
        raise _missing([0], world_size, timeout) from error
    meeting.set(f"here/{name}/{rank}", "")
    return PrefixStore(f"parallel_engine/{name}", store)


def _answer(meeting: Store, name: str, world_size: int, timeout: datetime.timedelta) -> None:
    """Answer every rank until all have confirmed; a name left by a dead one confirms nothing."""
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    waiting = set(range(1, world_size))
    while waiting:
        for rank in sorted(waiting):
            if meeting.check([f"here/{name}/{rank}"]):
                waiting.discard(rank)
            elif meeting.check([f"hello/{rank}"]):
                called = meeting.get(f"hello/{rank}")
                if answered.get(rank) != called:
                    meeting.set(f"answer/{called.decode()}", name)
                    answered[rank] = called
        if waiting and time.monotonic() > deadline:
            raise _missing(sorted(waiting), world_size, timeout)
        time.sleep(POLL_S if waiting else 0)


def _connect(facts: LaunchFacts, timeout: datetime.timedelta) -> Store:
    for name, value in (("MASTER_ADDR", facts.master_addr), ("MASTER_PORT", facts.master_port)):
        if not value:
            raise ConfigError(
                Problem(
                    name,
                    f"is not set, but RANK = {facts.rank} and WORLD_SIZE = {facts.world_size} are.",
                    "Start through torchrun or --nproc_per_node, or unset RANK and WORLD_SIZE.",
                )
            )
    try:
        if facts.listen_fd is None:
            found: Store = next(rendezvous("env://", timeout=timeout))[0]
            return found
        return TCPStore(
            facts.master_addr,
            int(facts.master_port),
            facts.world_size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=facts.listen_fd,
        )
    except (ValueError, dist.DistError) as error:
        raise ConfigError(_unusable(facts, error, timeout)) from error


def _unusable(facts: LaunchFacts, error: Exception, timeout: datetime.timedelta) -> Problem:
    if arrived := re.search(r"waiting for clients. (\d+)/", str(error)):
        return Problem(
            "WORLD_SIZE",
            f"= {facts.world_size}, but only {arrived[1]} arrived within "
            f"{timeout.total_seconds():.0f} s.",
            _SEE_WHAT_IT_PRINTED,
        )
    if "EADDRINUSE" in str(error):
        return Problem(
            "MASTER_PORT",
            f"= {facts.master_port} is taken on {facts.master_addr} by another process.",
            "Use a free port; `torchrun --standalone` and --nproc_per_node find one themselves.",
        )
    return Problem(
        "MASTER_ADDR",
        f"= {facts.master_addr!r} with MASTER_PORT = {facts.master_port!r} cannot be used by rank "
        f"{facts.rank}: {str(error).splitlines()[0]}",
        "It must be a host that every rank reaches, and on which rank 0 runs.",
    )


def _missing(ranks: list[int], world_size: int, timeout: datetime.timedelta) -> ConfigError:
    who = f"ranks {ranks}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return ConfigError(
        Problem(
            "WORLD_SIZE",
            f"= {world_size}, but {who} did not arrive within {timeout.total_seconds():.0f} s.",
            _SEE_WHAT_IT_PRINTED,
        )
    )
