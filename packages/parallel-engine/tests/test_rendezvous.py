"""Ranks find one another afresh, whatever an earlier attempt left in the launcher's store."""

import datetime
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

from parallel_config import ConfigError, ParallelismConfig
from parallel_config.environment import LaunchFacts
from parallel_engine import Engine, connect, unwrap
from parallel_engine.accelerate_build import launch_of, with_index
from parallel_engine.process import choose_device, process_groups, shared_device, timeout_of
from parallel_engine.rendezvous import fresh, meet
from parallel_testing.ranks import rank_outcomes, run_ranks


def seconds(number):
    return datetime.timedelta(seconds=number)


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, None, True, seconds(30), wait_for_workers=False)


def attempt(server, world_size, ranks, timeout_s=20):
    """What each rank that arrives gets, by rank; a thread with a connection of its own each."""
    found = {}

    def arrive(rank):
        try:
            store = TCPStore("127.0.0.1", server.port, None, False, seconds(timeout_s))
            found[rank] = fresh(store, rank, world_size, seconds(timeout_s))
            found[rank].set(f"was-here/{rank}", "")
        except ConfigError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout_s)
        assert not thread.is_alive()
    return found


def test_a_restart_sees_nothing_of_the_attempts_before_it(server):
    first = attempt(server, 4, range(4))
    first[0].set("address", "of a dead rank")
    assert first[3].get("address") == b"of a dead rank"
    # Two attempts in which not all arrive; what they called out stays in the store.
    assert "rank 2 did not arrive within 1 s" in attempt(server, 4, [0, 1, 3], timeout_s=1)[0]
    lost = attempt(server, 4, [1, 3], timeout_s=1)
    assert all("rank 0 did not arrive" in text for text in lost.values())
    again = attempt(server, 4, range(4))
    assert again[2].check([f"was-here/{rank}" for rank in range(4)])
    assert not again[1].check(["address"])


def test_a_restart_may_have_another_number_of_ranks(server):
    attempt(server, 4, range(4))
    again = attempt(server, 3, range(3))
    assert again[0].check(["was-here/0", "was-here/1", "was-here/2"])
    assert not again[0].check(["was-here/3"])


def facts(**changes):
    known = {"world_size": 2, "master_addr": "127.0.0.1", "master_port": "29500"}
    return LaunchFacts(**{**known, **changes})


def test_an_incomplete_address_is_named():
    with pytest.raises(ConfigError, match="MASTER_PORT is not set, but RANK = 0"):
        meet(facts(master_port=""), seconds(2))
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        meet(facts(master_addr="", rank=1), seconds(2))


def test_a_port_that_is_taken_is_told_at_once(server, monkeypatch):
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ConfigError, match=f"MASTER_PORT = {server.port} is taken on 127.0.0.1"):
        meet(facts(master_port=str(server.port)), seconds(2))


@pytest.mark.parametrize("port", ["none", "70000", "1"])
def test_an_address_that_leads_nowhere_is_named(port, monkeypatch):
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_PORT = '{port}' cannot be used by rank 1"):
        meet(facts(rank=1, master_port=port), seconds(1))


def test_more_ranks_than_devices_is_told_before_the_ranks_meet(monkeypatch):
    monkeypatch.delenv("PARALLEL_DEVICE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_device(None, facts(rank=1, local_rank=1)) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="LOCAL_RANK = 2, but this process sees 2 CUDA devices"):
        choose_device(None, facts(rank=2, local_rank=2, world_size=4))
    assert choose_device("cpu", facts(rank=2, local_rank=2)) == torch.device("cpu")


def test_a_rank_that_sees_one_device_takes_it_and_two_ranks_never_share_one(monkeypatch):
    monkeypatch.delenv("PARALLEL_DEVICE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for rank in (0, 3):
        found = choose_device(None, facts(rank=rank, local_rank=rank, world_size=4))
        assert found == torch.device("cuda", 0)
    assert shared_device([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")]) is None
    problem = shared_device([("a", "GPU-1"), ("b", "GPU-2"), ("b", "GPU-2")])
    assert problem.path == "device"
    assert problem.message.startswith("is the same for ranks 1 and 2: GPU-2 on b.")


def timeouts_of_groups(is_running):
    asked = datetime.timedelta(seconds=77)
    if is_running:
        dist.init_process_group("gloo", timeout=asked)
    degrees = ParallelismConfig(dp_replicate=2, dp_shard=2)
    engine = Engine(parallelism=degrees, device="cpu", timeout=asked)
    model = nn.Sequential(nn.Linear(4, 4))
    model._fsdp_wrap_modules = ("Linear",)
    engine.prepare(model, None, None, None)
    return [timeout_of(group, torch.device("cpu")).total_seconds() for group in process_groups()]


@pytest.mark.parametrize("is_running", [False, True], ids=["launched", "a group of one's own"])
def test_every_group_of_a_mesh_has_the_timeout_that_was_asked_for(is_running):
    for seconds_ in run_ranks(timeouts_of_groups, 4, is_running, init=False):
        assert len(seconds_) >= 3  # the launch's, and one for each axis of the mesh
        assert set(seconds_) == {77.0}


def test_a_device_that_was_chosen_is_the_one_that_accelerate_runs_on(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    chosen = choose_device("cuda:3", facts(rank=1, local_rank=1))
    assert chosen == torch.device("cuda", 3)
    assert launch_of(facts(rank=1, local_rank=1), chosen)["LOCAL_RANK"] == "3"
    assert with_index(torch.device("cuda")) == chosen != with_index(torch.device("cuda", 1))
    with pytest.raises(ConfigError, match="device = cuda:4, but this process sees 4 CUDA devices"):
        choose_device("cuda:4", facts())


def waits_for_rank_1():
    if os.environ["RANK"] == "0":
        Engine(timeout=seconds(2))


def comes_late_to_an_agreement():
    engine = Engine(timeout=seconds(3))
    if engine.rank == 1:
        time.sleep(8)
    engine.any(False)


def test_how_long_ranks_wait_is_the_callers_to_say():
    missing = rank_outcomes(waits_for_rank_1, 2, init=False)[0]
    assert "WORLD_SIZE = 2, but only 1 arrived within 2 s." in missing.error
    started = time.monotonic()
    late = rank_outcomes(comes_late_to_an_agreement, 2, init=False)[0]
    assert "Timed out waiting 3000ms" in late.error
    assert time.monotonic() - started < 45


class Block(nn.Linear):
    pass


def group_of_ones_own(backend="gloo", kept=()):
    """As under mp.spawn: no launcher, the ranks are numbered by the caller. Returns the rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        if name not in kept:
            del os.environ[name]
    del os.environ["MASTER_PORT"]
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
    return rank


def trains_in_a_group_of_ones_own(degrees, kept):
    rank = group_of_ones_own(kept=kept)
    torch.manual_seed(rank)
    model = nn.Sequential(Block(4, 2, bias=False))
    model._fsdp_wrap_modules = ("Block",)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(os.environ)
    engine = Engine(parallelism=ParallelismConfig(**degrees))
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    x = torch.ones(2, 4) * (rank + 1)
    norm = engine.step(model, optimizer, None, [x], lambda m, b: m(b).sum(1).mean()).grad_norm
    assert dict(os.environ) == before
    (weight,) = unwrap(model).parameters()
    weight = weight.full_tensor() if degrees else weight
    facts = (engine.rank, engine.facts.local_rank, engine.facts.local_world_size, engine.is_main)
    return engine.topology.describe(), facts, norm, weight.tolist()


@pytest.mark.parametrize("degrees", [{}, {"dp_shard": -1}], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("kept", [(), ("RANK", "WORLD_SIZE")], ids=["no launcher", "two variables"])
def test_a_group_that_is_running_says_which_rank_this_is(degrees, kept):
    results = run_ranks(trains_in_a_group_of_ones_own, 2, degrees, kept, init=False)
    for rank, (topology, facts, norm, weight) in enumerate(results):
        assert topology.endswith("= 2 ranks")
        assert facts == (rank, rank, 2, rank == 0)
        assert norm == pytest.approx((8 * 1.5**2) ** 0.5)
        assert weight == results[0][3]


def contradicts_its_group():
    """Rank 1's launcher had numbered it 0, and of one."""
    rank = group_of_ones_own()
    if rank == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1")
    with pytest.raises(ConfigError) as caught:
        connect()
    return str(caught.value)


def test_a_group_that_contradicts_the_launch_is_refused_on_every_rank():
    for text in run_ranks(contradicts_its_group, 2, init=False):
        assert text.startswith(
            "RANK = 0 and WORLD_SIZE = 1, but in the process group that is running this process "
            "is rank 1 of 2. Unset RANK and WORLD_SIZE"
        )


def without_cpu():
    group_of_ones_own("cuda:gloo")
    with pytest.raises(ConfigError) as caught:
        Engine()
    dist.destroy_process_group()
    return str(caught.value)


def test_a_group_that_cannot_agree_on_the_cpu_is_refused():
    for text in run_ranks(without_cpu, 2, init=False):
        assert text.startswith(
            "process group has the backends cuda:gloo, but a backend for cpu is missing"
        )
        assert "init_process_group('cpu:gloo,cuda:nccl')" in text


def test_accelerate_finds_the_launch_of_the_facts_and_none_for_a_single_rank():
    cpu = torch.device("cpu")
    assert launch_of(LaunchFacts(), cpu) == {}
    assert launch_of(facts(rank=5, local_rank=1, world_size=8, local_world_size=4), cpu) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def of_two_mpi_ranks():
    """A single rank that was started by hand on a node that MPI has given."""
    os.environ.update(OMPI_COMM_WORLD_SIZE="2", PMI_SIZE="2")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine()
    engine.prepare(model, optimizer, None, None)
    return engine.accelerator.num_processes, os.environ["PMI_SIZE"]


def test_what_another_launcher_left_makes_no_ranks():
    assert run_ranks(of_two_mpi_ranks, 1, init=False) == [(1, "2")]
