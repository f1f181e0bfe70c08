"""Ranks find one another afresh, whatever an earlier attempt left in the launcher's store."""

import datetime
import threading

import pytest
import torch
from torch.distributed import TCPStore

from parallel_config import ConfigError
from parallel_config.environment import LaunchFacts
from parallel_engine._ranks import choose_device
from parallel_engine.meeting import fresh, meet


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
