"""What would hang, or go wrong in silence, ends on every rank with an error that says why."""

import datetime
import os
import signal
import sys
import time

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import (
    AcceleratorConfig,
    ConfigError,
    GradientAccumulationConfig,
    ParallelismConfig,
    Problem,
)
from parallel_engine import Engine, UnitOrderError, from_main, together
from parallel_testing.ranks import rank_outcomes, run_ranks


class Block(nn.Linear):
    pass


class Choosy(nn.Module):
    """Runs the one block or the other; both have the same shape."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(4, 4), Block(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, x, first=0):
        return self.head(self.blocks[1 - first](self.blocks[first](x)))


def prepared(degrees, accumulation=1, build=Choosy, **options):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(
            gradient_accumulation=GradientAccumulationConfig(steps=accumulation)
        ),
        device="cpu",
        **options,
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    if engine.topology.is_sharded:
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return engine, model, optimizer


def in_another_order():
    engine, model, optimizer = prepared({"dp_shard": -1})
    x = torch.ones(2, 4)
    engine.step(model, optimizer, None, [x], lambda m, b: m(b).mean())
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(UnitOrderError) as caught:
        engine.step(model, optimizer, None, [x], lambda m, b: m(b, first=engine.rank).mean())
    after = [p.to_local() for p in model.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return str(caught.value), same


def test_another_order_of_units_is_caught_before_the_update():
    for message, unchanged in run_ranks(in_another_order, 2):
        assert "place 1 rank 0 ran 'blocks.0', rank 1 'blocks.1'" in message
        assert unchanged


def replicas_in_another_order():
    """Each shard group agrees with itself; the second runs its blocks the other way round.

    Returns the refusal, and the gradient of the first block where nobody looks at the order.
    """
    engine, model, optimizer = prepared({"dp_replicate": 2, "dp_shard": 2})
    x, first = torch.ones(2, 4), engine.rank // 2
    model(x, first=first).mean().backward()
    gradient = model.blocks[0].weight.grad.full_tensor().tolist()
    optimizer.zero_grad()
    with pytest.raises(UnitOrderError) as caught:
        engine.step(model, optimizer, None, [x], lambda m, b: m(b, first=first).mean())
    return str(caught.value), gradient


def true_gradient():
    """Of the first block: the mean over both orders."""
    torch.manual_seed(0)
    model, x = Choosy(), torch.ones(2, 4)
    (model(x, first=0).mean() / 2 + model(x, first=1).mean() / 2).backward()
    return model.blocks[0].weight.grad.tolist()


def test_the_order_is_one_over_replicas_too():
    """Replicas reduce unit after unit: in another order one block gets the other's gradient."""
    (wanted,) = run_ranks(true_gradient, 1, init=False)
    for message, gradient in run_ranks(replicas_in_another_order, 4, init=False):
        assert "rank 0 ran 'blocks.0', rank 2 'blocks.1'" in message
        assert not torch.allclose(torch.tensor(gradient), torch.tensor(wanted), atol=1e-3)


class Skipping(Choosy):
    """Leaves blocks out where it is told so."""

    def forward(self, x, without=()):
        for number, block in enumerate(self.blocks):
            if number not in without:
                x = block(x)
        return self.head(x)


def prints_into(folder):
    """What this rank prints as an error goes into a file of its own."""
    sys.stderr = open(f"{folder}/{os.environ['RANK']}", "w", buffering=1)  # noqa: SIM115


def printed_into(folder):
    return [path.read_text() for path in sorted(folder.iterdir())]


def runs_other_blocks(folder, without, pause_s=0.0):
    """Rank 1 leaves blocks out, or takes its time."""
    from parallel_engine import failures

    prints_into(folder)
    failures.STALL_S, failures.GRACE_S = 2.0, 1.0
    engine, model, optimizer = prepared({"dp_shard": -1}, build=Skipping)

    def loss_fn(m, batch):
        time.sleep(pause_s * engine.rank)
        return m(batch, without=without if engine.rank else ()).mean()

    engine.step(model, optimizer, None, [torch.ones(2, 4)], loss_fn)


@pytest.mark.parametrize(
    ("without", "rank_0", "rank_1"),
    [((0,), "blocks.0", "blocks.1"), ((1,), "blocks.1", "(end)")],
    ids=["the first", "the last"],
)
def test_ranks_that_wait_in_different_units_are_ended(without, rank_0, rank_1, tmp_path):
    """Their collectives do not fit one another, and nothing raises."""
    outcomes = rank_outcomes(runs_other_blocks, 2, tmp_path, without, init=False, timeout_s=60)
    for outcome, printed in zip(outcomes, printed_into(tmp_path), strict=True):
        assert outcome.exit_code == 1
        assert f"rank 0 ran '{rank_0}', rank 1 '{rank_1}'" in printed + outcome.error


def test_a_rank_that_takes_its_time_is_waited_for(tmp_path):
    run_ranks(runs_other_blocks, 2, tmp_path, (), 8.0, init=False)


def raises_on_rank_1(degrees, accumulation, where):
    engine, model, optimizer = prepared(degrees, accumulation)
    x = torch.ones(2, 4)

    def loss_fn(m, batch):
        if where == "forward" and engine.rank == 1:
            raise ValueError("sample 17 has no action")
        loss = m(batch).mean()
        if where == "backward" and engine.rank == 1:
            loss.register_hook(lambda g: (_ for _ in ()).throw(ValueError("sample 17 broke")))
        return loss

    engine.step(model, optimizer, None, [x] * accumulation, loss_fn)


@pytest.mark.parametrize(
    ("degrees", "accumulation", "where"),
    [({}, 1, "backward"), ({}, 2, "forward"), ({"dp_shard": -1}, 1, "forward")],
)
def test_a_rank_that_raises_ends_all_with_its_error(degrees, accumulation, where):
    started = time.monotonic()
    outcomes = rank_outcomes(raises_on_rank_1, 2, degrees, accumulation, where, init=False)
    assert [o.exit_code for o in outcomes] == [1, 1]
    assert [o.error_type for o in outcomes] == ["PeerError", "ValueError"]
    assert "rank 1 failed: ValueError: sample 17" in outcomes[0].error
    assert time.monotonic() - started < 45


def dies_on_rank_1(where):
    from parallel_engine import failures

    engine, model, optimizer = prepared({"dp_shard": -1})
    # Rank 0, which hosts the store, finds the dead rank before the others do, and may leave first.
    failures.HEARD_S = 3.0 + 2 * engine.rank
    end = (lambda *args: os.kill(os.getpid(), signal.SIGKILL)) if engine.rank == 1 else None

    def loss_fn(m, batch):
        if end is not None and where == "forward":
            end()
        loss = m(batch).mean()
        if end is not None and where == "backward":
            loss.register_hook(end)
        return loss

    if end is not None and where == "optimizer":
        optimizer.optimizer.register_step_pre_hook(end)
    for _ in range(2):  # the second one finds a rank that has died behind the last collective
        engine.step(model, optimizer, None, [torch.ones(2, 4)], loss_fn)


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_every_rank_that_is_left_names_the_killed_one(where):
    """Four ranks: rank 3 may learn it only when rank 0 ends, and the store with it."""
    ranks = 4 if where == "backward" else 2
    killed = rank_outcomes(dies_on_rank_1, ranks, where, init=False)
    assert [o.exit_code for o in killed] == [1, -signal.SIGKILL, 1, 1][:ranks]
    for outcome in (o for o in killed if o.rank != 1):
        assert outcome.error_type == "PeerError"
        assert "rank 1 gives no answer: killed, or cut off" in outcome.error


def comes_late_on_rank_1():
    from parallel_engine import failures

    failures.HEARD_S = 2.0
    engine, model, optimizer = prepared({"dp_shard": -1}, timeout=datetime.timedelta(seconds=3))

    def loss_fn(m, batch):
        if engine.rank == 1:
            time.sleep(8)
        return m(batch).mean()

    engine.step(model, optimizer, None, [torch.ones(2, 4)], loss_fn)


def test_a_late_rank_is_named_by_every_rank():
    for outcome in rank_outcomes(comes_late_on_rank_1, 2, init=False):
        assert outcome.error_type == "PeerError"
        assert "rank 1 did not come to a collective in time: late, or stuck" in outcome.error


def rank_0_dies():
    engine, model, optimizer = prepared({})

    def loss_fn(m, batch):
        if engine.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return m(batch).mean()

    engine.step(model, optimizer, None, [torch.ones(2, 4)], loss_fn)


def test_a_killed_rank_0_is_named_although_the_store_went_with_it():
    killed = rank_outcomes(rank_0_dies, 3, init=False)
    assert [o.exit_code for o in killed] == [-signal.SIGKILL, 1, 1]
    for outcome in killed[1:]:
        assert outcome.error_type == "PeerError"
        assert "rank 0 " in outcome.error


def one_rank_is_gone_at_an_agreement():
    engine, _, _ = prepared({})
    if engine.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.any(False)


def test_a_killed_rank_is_named_at_an_agreement_too():
    killed = rank_outcomes(one_rank_is_gone_at_an_agreement, 3, init=False)
    assert [o.exit_code for o in killed] == [1, 1, -signal.SIGKILL]
    for outcome in killed[:2]:
        assert outcome.error_type == "PeerError"
        assert "rank 2 gives no answer" in outcome.error


def stays_after_its_error():
    from parallel_engine import failures

    failures.GRACE_S, failures.HEARD_S = 1.0, 3.0
    engine, model, optimizer = prepared({"dp_shard": -1})
    if engine.rank == 0:
        engine.step(model, optimizer, None, [torch.ones(2, 4)], lambda m, b: m(b).mean())
    try:
        with engine.micro_batch(model, 0, 1):
            raise ValueError("caught and kept")
    except ValueError:
        time.sleep(6)


def test_a_peer_ends_even_when_its_collective_never_breaks():
    started = time.monotonic()
    outcomes = rank_outcomes(stays_after_its_error, 2, init=False)
    assert outcomes[0].exit_code == 1
    assert time.monotonic() - started < 45


def out_of_memory(m, batch):
    raise torch.OutOfMemoryError("CUDA out of memory (pretended)")


def handles_an_error(again):
    """Every rank runs out of memory and tries a smaller batch, of the same engine or another one.

    The second attempt goes on for longer than a peer's error would be borne.
    """
    from parallel_engine import failures

    failures.GRACE_S = 1.0
    engine, model, optimizer = prepared({})
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(model, optimizer, None, [torch.ones(8, 4)], out_of_memory)
    if again == "another engine":
        engine, model, optimizer = prepared({})
    for _ in range(12):
        engine.step(model, optimizer, None, [torch.ones(2, 4)], lambda m, b: m(b).mean())
        time.sleep(0.25)
    return engine, model, optimizer


def goes_on(again):
    handles_an_error(again)


def fails_later_on_rank_1(again):
    engine, model, optimizer = handles_an_error(again)

    def loss_fn(m, batch):
        if engine.rank == 1:
            raise ValueError("of the second attempt")
        return m(batch).mean()

    engine.step(model, optimizer, None, [torch.ones(2, 4)], loss_fn)


AGAIN = pytest.mark.parametrize("again", ["the same engine", "another engine"])


@AGAIN
def test_an_error_that_every_rank_has_handled_is_over(again):
    run_ranks(goes_on, 2, again, init=False)


@AGAIN
def test_a_later_error_is_the_one_that_is_told(again):
    outcomes = rank_outcomes(fails_later_on_rank_1, 2, again, init=False)
    assert [o.error_type for o in outcomes] == ["PeerError", "ValueError"]
    assert "rank 1 failed: ValueError: of the second attempt" in outcomes[0].error
    assert "out of memory" not in outcomes[0].error


def threads_left():
    import gc
    import threading

    for _ in range(3):
        engine, _, _ = prepared({})
        del engine
        gc.collect()
    return [t.name for t in threading.enumerate()].count("peer-failures")


def test_an_engine_that_is_dropped_watches_no_more():
    assert run_ranks(threads_left, 2, init=False) == [0, 0]


def damaged():
    raise ConfigError(Problem("episode 3", "is damaged."))


def wrong_input_on_rank_1():
    engine, model, optimizer = prepared({})

    def loss_fn(m, batch):
        if engine.rank == 1:
            damaged()
        return m(batch).mean()

    engine.step(model, optimizer, None, [torch.ones(2, 4)], loss_fn)


def test_wrong_input_that_one_rank_alone_finds_is_told():
    outcomes = rank_outcomes(wrong_input_on_rank_1, 2, init=False)
    assert [o.error_type for o in outcomes] == ["PeerError", "ConfigError"]
    assert "rank 1 failed: ConfigError: episode 3 is damaged." in outcomes[0].error


def wrong_input_that_is_agreed(folder):
    from parallel_engine import failures

    prints_into(folder)
    failures.GRACE_S = 0.5
    engine, model, optimizer = prepared({})
    for agree in (
        lambda: together(lambda: damaged() if engine.rank == 1 else None),
        lambda: from_main(damaged),
    ):
        with pytest.raises(ConfigError, match="episode 3 is damaged"), engine.telling_peers():
            agree()
    time.sleep(2)
    engine.step(model, optimizer, None, [torch.ones(2, 4)], lambda m, b: m(b).mean())


def test_wrong_input_that_all_know_of_is_told_to_nobody(tmp_path):
    run_ranks(wrong_input_that_is_agreed, 2, tmp_path, init=False)
    for printed in printed_into(tmp_path):
        assert "failed" not in printed


def store_goes_while_rank_1_tells():
    """Rank 0 hosts the store and leaves; rank 1 still waits for the answer of rank 2."""
    from parallel_engine import failures

    engine, _, _ = prepared({})
    if engine.rank == 2:
        failures.POLL_S = 60.0
        time.sleep(failures.HEARD_S + 2)
    elif engine.rank == 0:
        time.sleep(3)
        os._exit(1)
    time.sleep(1)
    with engine.telling_peers():
        raise RuntimeError("of this rank alone")


def test_who_failed_first_keeps_its_error_when_the_store_goes():
    outcome = rank_outcomes(store_goes_while_rank_1_tells, 3, init=False)[1]
    assert outcome.error_type == "RuntimeError"
    assert "of this rank alone" in outcome.error
