"""Unusual models, batches and weights: every kind of run computes the numbers of one process.

Ranks start with seeds of their own, so every case also shows that rank 0's values are everybody's.
The cases of one kind share a launch.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import (
    AcceleratorConfig,
    DDPConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    ParallelismConfig,
)
from parallel_engine import Engine, Loss, unwrap
from parallel_testing.models import OddModel
from parallel_testing.ranks import run_ranks

STEPS, ROWS, WIDTH = 4, 8, 4
KINDS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"dp_shard": -1}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
DISTRIBUTED = [kind for kind in KINDS if kind != "single"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks between two layers of the root unit; (rows, 4) to the same shape."""

    _fsdp_wrap_modules = ("Block",)
    _fsdp_forward_methods = ("act",)

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def act(self, x):
        """What a policy does when it is asked for an action."""
        return self(x).argmax(dim=-1)


class TiedInTheRoot(Net):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class OneBlockTwice(Net):
    def __init__(self):
        super().__init__()
        self.blocks[2] = self.blocks[0]


class FrozenUnit(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Buffers(Net):
    """Random ones, so that ranks differ: kept in checkpoints or not, and a counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("mask", torch.randn(1, WIDTH).expand(3, WIDTH), persistent=False)
        self.register_buffer("count", torch.randint(1, 9, ()))

    def forward(self, x):
        return super().forward(x * self.mask[0] + self.shift) * self.count


class NotContiguous(Net):
    """A transposed weight, and a convolution in channels_last."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, WIDTH).t())
        self.conv = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        folded = self.conv(x.reshape(-1, 2, 2, 1).expand(-1, 2, 2, 2))
        return super().forward(x) @ self.turned @ self.turned.t() + folded.reshape(len(x), -1).sum(
            dim=1, keepdim=True
        )


class Alternating(Net):
    """Layer `a` takes part in odd batches only, `b` in even ones."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return super().forward((self.a if self.num_calls % 2 else self.b)(x))


def mean_square(model, batch):
    return model(batch).square().mean()


def masked(model, batch):
    """Rows of which the first entry is large do not count; on some ranks none counts."""
    keep = (batch[:, 0] < 0.5).to(batch.dtype)
    return Loss((model(batch).square().mean(dim=1) * keep).sum(), keep.sum())


def nothing(model, batch):
    return model(batch).mean() * 0


def rows(step):
    generator = torch.Generator().manual_seed(step)
    return torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64).sort(dim=0).values


def share(engine, batch, accumulation):
    """A rank's part of each micro-batch, in order: a mask may take all rows of a rank."""
    world, rank = engine.topology.dp_world_size, engine.rank
    return [micro.chunk(world)[rank] for micro in batch.chunk(accumulation)]


def all_to_rank_0(engine, batch, accumulation):
    """The other ranks get batches without a row."""
    return [batch if engine.rank == 0 else batch[:0]]


def two_groups(model):
    """Weights decay, biases do not and learn faster."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": biases, "weight_decay": 0.0, "lr": 3e-2}, {"params": weights}], lr=1e-2
    )


def adagrad(model):
    """Makes its state in the constructor, so that it must see the shards."""
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)


def case(
    model=Net,
    loss_fn=mean_square,
    *,
    cut=share,
    clip=0.3,
    accumulation=1,
    optimizer=None,
    late=None,
    **config,
):
    return model, loss_fn, cut, clip, accumulation, optimizer, late, config


CASES = {
    "odd": case(OddModel, ddp=DDPConfig(find_unused_parameters=True)),
    "tied_in_the_root": case(TiedInTheRoot),
    "one_block_twice": case(OneBlockTwice),
    "frozen_unit": case(FrozenUnit),
    "buffers": case(Buffers),
    "not_contiguous": case(NotContiguous),
    "ignored": case(fsdp=FSDPConfig(ignored_modules=("head", "blocks.1"))),
    "alternating": case(
        Alternating, accumulation=2, ddp=DDPConfig(find_unused_parameters=True)
    ),
    "empty": case(cut=all_to_rank_0),
    "masked": case(loss_fn=masked),
    "masked_accumulated": case(loss_fn=masked, accumulation=2),
    "tiny_clip": case(clip=1e-6),
    "no_gradient": case(loss_fn=nothing),
    "two_groups": case(optimizer=two_groups),
    "two_groups_late": case(late=two_groups),
    "adagrad": case(late=adagrad),
    "by_size": case(fsdp=FSDPConfig(min_num_params=20)),
}  # fmt: skip


def train(degrees, name):
    """(sharded parameters, reports, weights and buffers whole, actions) of one case."""
    build, loss_fn, cut, clip, accumulation, early, late, config = CASES[name]
    model = build() if build is not OddModel else OddModel(seed=None)
    model = model.double()
    early = early or (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    optimizer = late or early(model)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(
            gradient_accumulation=GradientAccumulationConfig(steps=accumulation), **config
        ),
        device="cpu",
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    entries = sum(len(state) for state in optimizer.state_dict()["state"].values())
    assert entries == (20 if name == "adagrad" else 0)
    reports = []
    for step in range(STEPS):
        window = cut(engine, rows(step), accumulation)
        report = engine.step(model, optimizer, None, window, loss_fn, clip_norm=clip)
        reports.append((report.loss, report.grad_norm))
    model.eval()
    actions = model.act(rows(99)).tolist() if hasattr(model, "act") else None
    named = [*unwrap(model).named_parameters(), *unwrap(model).named_buffers()]
    held = {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named
    }
    return sum(isinstance(t, DTensor) for _, t in named), reports, held, actions


def train_all(degrees):
    """Every case; each rank draws its own first weights."""
    import os

    results = {}
    for name in CASES:
        torch.manual_seed(100 + int(os.environ["RANK"]))
        results[name] = train(degrees, name)
    return results


@pytest.fixture(scope="module")
def results():
    """By kind, then rank, then case."""
    return {
        kind: run_ranks(train_all, world_size, degrees, init=False, timeout_s=300)
        for kind, (world_size, degrees) in KINDS.items()
    }


WHOLE = {"odd": 1, "ignored": 4}
"""Parameters that stay whole where the others are cut: the 0-dim one, those of ignored modules."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_the_numbers_are_those_of_one_process(results, kind, name):
    _, reports, held, actions = results["single"][0][name]
    assert all(loss == loss for loss, _ in reports)
    for ranks in results[kind]:
        sharded, found, weights, acted = ranks[name]
        count = len(list(CASES[name][0]().parameters()))
        assert sharded == (0 if kind == "ddp" else count - WHOLE.get(name, 0))
        for pair, wanted in zip(found, reports, strict=True):
            assert pair == pytest.approx(wanted, rel=1e-9)
        for fqn, wanted in held.items():
            torch.testing.assert_close(weights[fqn], wanted, rtol=0, atol=1e-9)
        assert acted == actions


@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_ranks_end_with_the_same_bits(results, kind):
    """Replicas and whole parameters do not drift."""
    first, *others = results[kind]
    for name in CASES:
        for other in others:
            assert other[name][1] == first[name][1]
            for fqn, wanted in first[name][2].items():
                assert torch.equal(other[name][2][fqn], wanted), (name, fqn)


def test_the_cases_are_what_they_say(results):
    """The guards above would pass on cases in which nothing happens."""
    single = results["single"][0]
    assert all(norm > 0.3 for _, norm in single["odd"][1])
    assert [norm for _, norm in single["no_gradient"][1]] == [0.0] * STEPS
    assert len({loss for loss, _ in single["alternating"][1]}) == STEPS
    last = rows(0)[-ROWS // 4 :]
    assert not (last[:, 0] < 0.5).any()
    assert not NotContiguous().turned.is_contiguous()
