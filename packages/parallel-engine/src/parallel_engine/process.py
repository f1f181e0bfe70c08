"""A rank's process: its device, how it joins the process group, and how it leaves."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from parallel_config import ConfigError, Problem
from parallel_config.environment import LaunchFacts, launch_variables, requested_device
from parallel_engine.agreement import together
from parallel_engine.rendezvous import meet

TIMEOUT = datetime.timedelta(minutes=10)
"""How long ranks wait for one another, at the start and in each collective, by default."""


def choose_device(device: torch.device | str | None, facts: LaunchFacts) -> torch.device:
    """The device of this rank: as asked, else `PARALLEL_DEVICE`, else CUDA where there is one.

    A CUDA device has its index: that asked for, else the local rank.

    Raises:
        ConfigError: the device does not exist on this host, or there are more ranks than CUDA
            devices.
    """
    best = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device or requested_device() or best)
    if chosen.type != "cuda":
        return chosen
    count = torch.cuda.device_count()
    if chosen == torch.device("cuda"):  # without an index
        _require_device_of_its_own(facts, count)
        return torch.device("cuda", facts.local_rank)
    if chosen.index >= count:
        raise ConfigError(
            Problem(
                "device",
                f"= {chosen}, but this process sees {count} CUDA devices.",
                "Their numbers begin at 0; CUDA_VISIBLE_DEVICES may hide some.",
            )
        )
    return chosen


def _require_device_of_its_own(facts: LaunchFacts, count: int) -> None:
    if facts.local_rank < count:
        return
    raise ConfigError(
        Problem(
            "LOCAL_RANK",
            f"= {facts.local_rank}, but this process sees {count} CUDA devices.",
            "Start one rank per device; under Slurm give each task all of the node's "
            "(--gpus-per-node). PARALLEL_DEVICE=cpu runs without.",
        )
    )


def connect(
    device: torch.device | str | None = None, *, timeout: datetime.timedelta = TIMEOUT
) -> LaunchFacts:
    """Collective: every rank. Start the process group of the launch unless there is one.

    `Engine` calls it by itself. Call it earlier where ranks must agree on the config first, and
    give the engine what it returns. On CUDA the group has gloo beside nccl: agreements and
    offloaded state need a CPU backend. A group that is running already decides the rank and the
    world size, and keeps its timeout. A CUDA device becomes the current one, also in a single
    process: accelerate uses no other.

    Raises:
        ConfigError: the ranks cannot meet; says which variable is wrong or which ranks are missing.
            Or the running group contradicts the launch, or a backend is missing in it.
    """
    running = dist.is_initialized()
    facts = _facts_of_group() if running else LaunchFacts.read()
    chosen = choose_device(device, facts)
    if on_cuda := chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if running and facts.world_size > 1:
        _require_backends("cpu", chosen.type)
    if running or facts.world_size == 1:
        return facts
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=meet(facts, timeout),
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timeout,
    )
    return facts


def _facts_of_group() -> LaunchFacts:
    """Collective: every rank. Where this process stands in the group that is running.

    Without LOCAL_RANK the ranks of a host are counted in their order.

    Raises:
        ConfigError: on every rank: RANK or WORLD_SIZE of one of them says something else.
    """
    _require_backends("cpu")
    said = together(LaunchFacts.read)
    has_number = "LOCAL_RANK" in launch_variables()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks: list[tuple[str, LaunchFacts]] = [("", said)] * world_size
    dist.all_gather_object(ranks, (socket.gethostname(), said))
    for number, (_, other) in enumerate(ranks):
        if other.is_launched and (other.rank, other.world_size) != (number, world_size):
            raise ConfigError(
                Problem(
                    "RANK",
                    f"= {other.rank} and WORLD_SIZE = {other.world_size}, but in the process group "
                    f"that is running this process is rank {number} of {world_size}.",
                    "Unset RANK and WORLD_SIZE, or start the group with what they say.",
                )
            )
    hosts = [host for host, _ in ranks]
    return dataclasses.replace(
        said,
        rank=rank,
        world_size=world_size,
        local_rank=said.local_rank if has_number else hosts[:rank].count(hosts[rank]),
        local_world_size=hosts.count(hosts[rank]),
    )


def _require_backends(*device_types: str) -> None:
    found = dist.get_backend_config()
    missing = set(device_types) - {pair.partition(":")[0] for pair in found.split(",")}
    if missing:
        raise ConfigError(
            Problem(
                "process group",
                f"has the backends {found}, but a backend for {' and '.join(sorted(missing))} is "
                "missing; the ranks agree with one another on the CPU.",
                "Start it with init_process_group('cpu:gloo,cuda:nccl'), or leave it to Engine.",
            )
        )


def part() -> None:
    """Collective: every rank. Meet once more and dissolve the group.

    Afterwards no rank waits for another one, however long its work takes.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def leave(code: int, *, together: bool | None = None) -> NoReturn:
    """End this rank's process, in the worker's main only.

    A plain exit may abort while a gloo thread still owns a tensor, and a peer that leaves early
    breaks the others' last collective. So ranks that end well (`together`, by default with code 0)
    meet once more and destroy the group. A rank that failed leaves at once.
    """
    if code == 0 if together is None else together:
        part()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
