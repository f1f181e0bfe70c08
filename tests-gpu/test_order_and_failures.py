"""What would hang ends on every rank, over NCCL too, whose collectives raise nothing by themselves.

A rank that waits for NCCL stands in the driver: the exception of a broken collective never reaches
it. There the watching thread of `parallel_engine.failures` ends it, or NCCL's own watchdog does
after the timeout. On gloo the collective itself breaks.
"""

import datetime
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import ParallelismConfig
from parallel_engine import Engine, UnitOrderError, together
from parallel_testing.ranks import rank_outcomes, run_ranks

TIMEOUT = datetime.timedelta(seconds=40)
"""Of collectives: where nothing else ends a rank, NCCL's watchdog does."""


class Block(nn.Linear):
    pass


class Choosy(nn.Module):
    """Runs its blocks in the order, and leaves out those, that it is told."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(4, 4), Block(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, x, order=(0, 1)):
        for number in order:
            x = self.blocks[number](x)
        return self.head(x)


def prepared(device, degrees):
    """Engine, model, optimizer, input; what a peer prints goes on to a file of its own."""
    from parallel_engine import failures

    failures.STALL_S, failures.GRACE_S = 3.0, 2.0
    torch.manual_seed(0)
    model = Choosy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(parallelism=ParallelismConfig(**degrees), device=device, timeout=TIMEOUT)
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    assert sharded == engine.topology.is_sharded
    x = torch.ones(2, 4, device=engine.device)
    # One update first: NCCL meets its peers in the first collective, which is another matter.
    engine.step(model, optimizer, None, [x], lambda m, b: m(b).mean())
    return engine, model, optimizer, x


def prints_into(folder):
    sys.stderr = open(f"{folder}/{os.environ['RANK']}", "w", buffering=1)  # noqa: SIM115


def said(outcome, folder):
    return (folder / str(outcome.rank)).read_text() + outcome.error


def run(fn, world_size, device, *args):
    return rank_outcomes(fn, world_size, device, *args, init=False, device=device, timeout_s=150)


@pytest.fixture
def sharded(layouts, world_size):
    """Degrees of a sharded run; one rank alone does not have peers."""
    if "fsdp" not in layouts:
        pytest.skip(f"fsdp cannot be shown on {world_size} rank(s)")
    return layouts["fsdp"]


def in_another_order(device, degrees):
    engine, model, optimizer, x = prepared(device, degrees)
    before = [p.to_local().clone() for p in model.parameters()]
    order = (1, 0) if engine.rank else (0, 1)
    with pytest.raises(UnitOrderError) as caught:
        engine.step(model, optimizer, None, [x], lambda m, b: m(b, order=order).mean())
    after = [p.to_local() for p in model.parameters()]
    return str(caught.value), all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_another_order_of_units_is_caught_before_the_update(device, world_size, sharded):
    """Units of one shape: their collectives fit, and rank 1 gets the other block's weights."""
    for message, unchanged in run_ranks(
        in_another_order, world_size, device, sharded, init=False, device=device
    ):
        assert "rank 0 ran 'blocks.0', rank 1 'blocks.1'" in message
        assert unchanged


def runs_other_blocks(device, degrees, folder):
    prints_into(folder)
    engine, model, optimizer, x = prepared(device, degrees)
    order = (1,) if engine.rank == 1 else (0, 1)
    engine.step(model, optimizer, None, [x], lambda m, b: m(b, order=order).mean())


def test_ranks_that_wait_in_different_units_are_ended(device, world_size, sharded, tmp_path):
    for outcome in run(runs_other_blocks, world_size, device, sharded, tmp_path):
        text = said(outcome, tmp_path)
        assert outcome.exit_code == 1, text
        assert "rank 0 ran 'blocks.0', rank 1 'blocks.1'" in text


def raises_on_rank_1(device, degrees, folder):
    prints_into(folder)
    engine, model, optimizer, x = prepared(device, degrees)

    def loss_fn(m, batch):
        if engine.rank == 1:
            raise ValueError("sample 17 has no action")
        return m(batch).mean()

    engine.step(model, optimizer, None, [x], loss_fn)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_raises_ends_all_with_its_error(kind, device, world_size, layouts, tmp_path):
    if kind not in layouts:
        pytest.skip(f"{kind} cannot be shown on {world_size} rank(s)")
    outcomes = run(raises_on_rank_1, world_size, device, layouts[kind], tmp_path)
    assert [o.exit_code for o in outcomes] == [1] * world_size
    assert outcomes[1].error_type == "ValueError"
    for outcome in outcomes:
        assert "sample 17 has no action" in said(outcome, tmp_path)


def dies_on_rank_1(device, degrees, folder):
    from parallel_engine import failures

    prints_into(folder)
    engine, model, optimizer, x = prepared(device, degrees)
    failures.GRACE_S = 20.0  # longer than a survivor waits for the word of the rank that is gone

    def loss_fn(m, batch):
        if engine.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return m(batch).mean()

    engine.step(model, optimizer, None, [x], loss_fn)


def test_a_killed_rank_ends_its_peers(device, world_size, sharded, tmp_path):
    """The engine tests who is named. NCCL may abort the peers after the timeout, in its words;
    `ptrain`'s launcher and torchrun end them sooner, and name the rank.
    """
    outcomes = run(dies_on_rank_1, world_size, device, sharded, tmp_path)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (o for o in outcomes if o.rank != 1):
        text = said(outcome, tmp_path)
        assert outcome.exit_code is not None, f"rank {outcome.rank} hung\n{text}"
        assert outcome.exit_code != 0
        if device == "cpu":
            assert "rank 1 gives no answer: killed, or cut off" in text


def agrees_during_a_collective(device, degrees):
    """Agreements run on the CPU's group: they neither wait for the device's nor disturb it."""
    engine, _, _, _ = prepared(device, degrees)
    size = 1 << 22 if device == "cuda" else 1 << 10
    value = torch.full((size,), float(engine.rank + 1), device=engine.device)
    answers = []
    for _ in range(10):
        work = dist.all_reduce(value, async_op=True)
        answers.append(engine.any(engine.rank == 1))
        together(lambda: None)
        work.wait()
        value /= engine.topology.world_size
    return answers, float(value.max()), float(value.min())


def test_an_agreement_during_a_collective(device, world_size, sharded):
    mean = (world_size + 1) / 2
    for answers, high, low in run_ranks(
        agrees_during_a_collective, world_size, device, sharded, init=False, device=device
    ):
        assert answers == [True] * 10
        assert (high, low) == (pytest.approx(mean), pytest.approx(mean))


def meets_late(device, degrees):
    """Rank 1 comes to the update late: that is not an error, however the others wait."""
    engine, model, optimizer, x = prepared(device, degrees)
    time.sleep(6.0 if engine.rank == 1 else 0.0)
    engine.step(model, optimizer, None, [x], lambda m, b: m(b).mean())


def test_a_rank_that_takes_its_time_is_waited_for(device, world_size, sharded):
    run_ranks(meets_late, world_size, device, sharded, init=False, device=device)
