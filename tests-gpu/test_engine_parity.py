"""DDP, FSDP2 and HSDP compute what one process computes, and end with 0."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import AcceleratorConfig, GradientAccumulationConfig, ParallelismConfig
from parallel_engine import Engine, Loss, leave, unwrap
from parallel_testing.ranks import rank_outcomes, run_ranks

STEPS, GLOBAL_BATCH, WIDTH = 5, 16, 12
KINDS = ("ddp", "fsdp", "hsdp")


class Block(nn.Module):
    """A wrap unit whose rows do not divide evenly."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks and a head, with a loss that is an entry point of its own."""

    _fsdp_wrap_modules = ("Block",)
    _fsdp_forward_methods = ("compute_loss",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale

    def compute_loss(self, x, y, keep):
        """Masked, so that micro-batches weigh differently."""
        error = (self(x) - y).square().sum(dim=-1) * keep
        return Loss(error.sum(), keep.sum())


class InlineModel(Model):
    """The same without a declared entry point."""

    _fsdp_forward_methods = ()


def by_method(model, batch):
    return model.compute_loss(*batch)


def by_forward(model, batch):
    x, y, keep = batch
    error = (model(x) - y).square().sum(dim=-1) * keep
    return Loss(error.sum(), keep.sum())


def windows(engine, accumulation, dtype):
    """The rank's micro-batches of a fixed stream, a list for each update."""
    generator = torch.Generator().manual_seed(7)
    count = STEPS * GLOBAL_BATCH
    x = torch.randn(count, WIDTH, generator=generator, dtype=dtype)
    y = torch.randn(count, 5, generator=generator, dtype=dtype)
    keep = (torch.rand(count, generator=generator) > 0.4).to(dtype)
    size = GLOBAL_BATCH // engine.topology.dp_world_size // accumulation
    starts = [
        (step * accumulation + micro) * engine.topology.dp_world_size * size + engine.rank * size
        for step in range(STEPS)
        for micro in range(accumulation)
    ]
    batches = [tuple(t[s : s + size].to(engine.device) for t in (x, y, keep)) for s in starts]
    return [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]


def train(device, degrees, accumulation=1, entry="method"):
    """(kind, sharded parameters, reports, full weights on CPU)."""
    torch.manual_seed(3)
    model = (Model if entry == "method" else InlineModel)().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(
            gradient_accumulation=GradientAccumulationConfig(steps=accumulation)
        ),
        device=device,
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    loss_fn = by_method if entry == "method" else by_forward
    reports = [
        engine.step(model, optimizer, None, window, loss_fn, clip_norm=0.5)
        for window in windows(engine, accumulation, torch.float64)
    ]
    sharded = sum(isinstance(p, DTensor) for p in model.parameters())
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu().clone()
        for name, p in unwrap(model).named_parameters()
    }
    return engine.topology.kind.value, sharded, [(r.loss, r.grad_norm) for r in reports], weights


def train_and_leave(device, degrees):
    train(device, degrees)
    leave(0)


def run(fn, world_size, device, *args):
    return run_ranks(fn, world_size, device, *args, init=False, device=device)


@pytest.fixture(scope="module")
def reference(device):
    """One process over the whole global batch."""
    return run(train, 1, device, {})[0]


def require(kind, layouts, world_size):
    if kind not in layouts:
        pytest.skip(f"{kind} cannot be shown on {world_size} rank(s)")
    return layouts[kind]


def assert_parity(result, kind, reference):
    """Loss, norm before clipping and weights; a sharded kind is sharded."""
    assert result[0] == kind
    assert result[1] == (0 if kind in ("ddp", "single") else len(reference[3]) - 1)
    for found, wanted in zip(result[2], reference[2], strict=True):
        assert found == pytest.approx(wanted, rel=1e-10)
    for name, wanted in reference[3].items():
        torch.testing.assert_close(result[3][name], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_norm_parity(kind, accumulation, device, layouts, world_size, reference):
    """Every rank, with and without accumulation, through a declared method."""
    degrees = require(kind, layouts, world_size)
    for result in run(train, world_size, device, degrees, accumulation):
        assert_parity(result, kind, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_alone_gives_the_same(kind, device, layouts, world_size, reference):
    degrees = require(kind, layouts, world_size)
    for result in run(train, world_size, device, degrees, 1, "forward"):
        assert_parity(result, kind, reference)


def test_the_clip_is_in_force_and_one_process_accumulates(device, reference):
    assert all(norm > 0.5 for _, norm in reference[2])
    assert_parity(run(train, 1, device, {}, 4)[0], "single", reference)


@pytest.mark.parametrize("kind", KINDS)
def test_clean_runs_end_with_zero(kind, device, layouts, world_size):
    degrees = require(kind, layouts, world_size)
    for _ in range(3 if device == "cpu" else 10):
        outcomes = rank_outcomes(
            train_and_leave, world_size, device, degrees, init=False, device=device
        )
        assert [o.exit_code for o in outcomes] == [0] * world_size, outcomes
