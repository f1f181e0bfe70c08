"""Every kind of run computes the same updates, from the degrees alone."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import (
    AcceleratorConfig,
    GradientAccumulationConfig,
    Kind,
    ParallelismConfig,
)
from parallel_engine import Engine, Loss, unwrap
from parallel_testing.ranks import run_ranks

STEPS, GLOBAL_BATCH, WIDTH = 6, 8, 6
LAYOUTS = {
    "ddp": (2, {}),
    "fsdp": (2, {"dp_shard": -1}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


class Block(nn.Module):
    """A wrap unit whose rows do not divide evenly."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks, a head with 5 rows, a 0-dim scale and a frozen layer."""

    _fsdp_wrap_modules = ("Block",)
    _fsdp_forward_methods = ("compute_loss",)

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale

    def compute_loss(self, x, y, keep):
        """Masked: the number of entries differs between micro-batches."""
        error = (self(x) - y).square().sum(dim=-1) * keep
        return Loss(error.sum(), keep.sum())


def samples(dtype):
    generator = torch.Generator().manual_seed(7)
    count = STEPS * GLOBAL_BATCH
    x = torch.randn(count, WIDTH, generator=generator, dtype=dtype)
    y = torch.randn(count, 5, generator=generator, dtype=dtype)
    keep = (torch.rand(count, generator=generator) > 0.4).to(dtype)
    return x, y, keep


class Slices:
    """The rank's micro-batches of a fixed stream."""

    def __init__(self, engine, accumulation, dtype):
        self.data, self.engine, self.accumulation = samples(dtype), engine, accumulation

    def __iter__(self):
        world, rank = self.engine.topology.dp_world_size, self.engine.rank
        size = GLOBAL_BATCH // world // self.accumulation
        for start in range(0, STEPS * GLOBAL_BATCH, world * size):
            first = start + rank * size
            yield tuple(t[first : first + size] for t in self.data)


def train(degrees, accumulation=1, dtype=torch.float64, precision="no", sync_each_batch=False):
    """Reports and full weights after a few clipped updates."""
    torch.manual_seed(3)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(
            mixed_precision=precision,
            gradient_accumulation=GradientAccumulationConfig(
                steps=accumulation, sync_each_batch=sync_each_batch
            ),
        ),
        device="cpu",
    )
    model, optimizer, scheduler, _ = engine.prepare(model, optimizer, scheduler, None)
    windows = engine.accumulate(Slices(engine, accumulation, dtype))
    reports = [
        engine.step(model, optimizer, scheduler, w, loss_fn, clip_norm=0.5)
        for w, _ in zip(windows, range(STEPS), strict=False)
    ]
    sharded = sum(isinstance(p, DTensor) for p in model.parameters())
    local = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()
    )
    weights = {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in unwrap(model).named_parameters()
    }
    numbers = [(r.loss, r.grad_norm, r.lr) for r in reports]
    return engine.topology.kind.value, sharded, local, numbers, weights


def loss_fn(model, batch):
    return model.compute_loss(*batch)


@pytest.fixture(scope="module")
def reference():
    """One process over the whole global batch."""
    return run_ranks(train, 1, {}, init=False)[0]


def assert_equal(result, reference):
    _, _, _, numbers, weights = result
    for found, wanted in zip(numbers, reference[3], strict=True):
        assert found == pytest.approx(wanted, rel=1e-10)
    for name, wanted in reference[4].items():
        torch.testing.assert_close(weights[name], wanted, rtol=0, atol=1e-10)


def test_the_reference_is_one_process_with_a_falling_rate(reference):
    assert reference[0] == Kind.SINGLE
    rates = [lr for _, _, lr in reference[3]]
    assert rates == pytest.approx([1e-2 / (1 + n) for n in range(STEPS)], rel=1e-12)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_equals_one_process(name, accumulation, reference):
    world_size, degrees = LAYOUTS[name]
    for result in run_ranks(train, world_size, degrees, accumulation):
        kind, sharded, local, _, _ = result
        assert kind == name
        if name == "ddp":
            assert sharded == 0
        else:
            # All but the 0-dim scale are cut in two; a rank holds about half.
            assert sharded == len(reference[4]) - 1
            assert local < 0.6 * reference[2]
        assert_equal(result, reference)


@pytest.mark.parametrize("name", LAYOUTS)
def test_syncing_every_micro_batch_changes_no_number(name, reference):
    world_size, degrees = LAYOUTS[name]
    for result in run_ranks(train, world_size, degrees, 2, torch.float64, "no", True):
        assert result[0] == name
        assert_equal(result, reference)


def test_accumulation_in_one_process(reference):
    assert_equal(run_ranks(train, 1, {}, 4, init=False)[0], reference)
