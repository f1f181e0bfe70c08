"""A rank's process: its device, how it joins the process group, and how it leaves."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import sys
from collections.abc import Container, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from parallel_config import ConfigError, Problem, agreed
from parallel_config.environment import LaunchFacts, launch_variables, requested_device
from parallel_engine.agreement import together
from parallel_engine.rendezvous import meet

TIMEOUT = datetime.timedelta(minutes=10)
"""How long ranks wait for one another, at the start and in each collective, by default."""


def choose_device(device: torch.device | str | None, facts: LaunchFacts) -> torch.device:
    """The device of this rank: as asked, else `PARALLEL_DEVICE`, else CUDA where there is one.

    A CUDA device has its index: that asked for, else the local rank. A process that sees exactly
    one device takes it: schedulers hand each rank its own (Slurm's --gpus-per-task=1). `connect`
    makes sure that no two ranks share one.

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
        if count == 1:
            return torch.device("cuda", 0)
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
            "Start one rank per device, and let it see all devices of the node or only its own "
            "(Slurm: --gpus-per-node or --gpus-per-task=1). PARALLEL_DEVICE=cpu runs without.",
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
    if on_cuda:
        _require_devices_apart(chosen)
    return facts


def _require_devices_apart(device: torch.device) -> None:
    """Collective: every rank. NCCL would only say that it found a duplicate GPU, at first use."""
    mine = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    found: list[tuple[str, str]] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if problem := shared_device(found):
        raise agreed(ConfigError(problem))


def shared_device(devices: Sequence[tuple[str, str]]) -> Problem | None:
    """The first two ranks that run on one device, given host and device of each rank."""
    for rank, device in enumerate(devices):
        first = devices.index(device)
        if first != rank:
            return Problem(
                "device",
                f"is the same for ranks {first} and {rank}: {device[1]} on {device[0]}. Each of "
                "them sees one CUDA device.",
                "Start as many ranks as there are devices, or give each rank a device of its own "
                "(CUDA_VISIBLE_DEVICES; Slurm: --gpus-per-task=1).",
            )
    return None


def with_timeout_of_world(before: Container[dist.ProcessGroup]) -> None:
    """Give every process group that is not in `before` the timeout of the launch's group.

    The groups of a mesh are made with torch's default (30 minutes on gloo), whatever was asked for.
    """
    world = dist.group.WORLD
    if world is None:
        return
    for group in process_groups():
        if group is not world and group not in before:
            for device in group._device_types:
                wanted = timeout_of(world, device)
                if wanted is not None:
                    group._get_backend(device)._set_default_timeout(wanted)


def process_groups() -> list[dist.ProcessGroup]:
    """Of this process, the launch's group included."""
    return list(dist.distributed_c10d._world.pg_map)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """How long ranks wait for one another in the group's collectives on this kind of device."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


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
                "Start it with init_process_group('cpu:gloo,cuda:nccl'), or let Engine start it.",
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
