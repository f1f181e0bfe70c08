"""The weight average and the loss on held-out data, on every kind of run."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import ConfigError, EMAConfig, ParallelismConfig
from parallel_engine import Ema, Engine, Loss, evaluate_loss, resume_average
from parallel_testing.models import TinyModel
from parallel_testing.ranks import run_ranks

LAYOUTS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"dp_shard": -1}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
STEPS, ROWS = 5, 8


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS * ROWS, 4, generator=generator, dtype=dtype)
    return x, torch.randn(STEPS * ROWS, 3, generator=generator, dtype=dtype)


def squared(model, batch):
    error = (model(batch[0]) - batch[1]).square().sum()
    weight = torch.tensor(float(len(batch[0])), dtype=error.dtype)
    return Loss(error, weight), {"twice": 2 * error.detach() / weight}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(model):
    return {
        name.removeprefix("module."): whole(p.detach()).clone()
        for name, p in model.named_parameters()
    }


class OnlyLater(TinyModel):
    """Its head's bias gets no gradient before the third update."""

    updates = 0

    def forward(self, x):
        hidden = self.embed(x)
        bias = self.head.bias if self.updates >= 2 else self.head.bias.detach()
        return nn.functional.linear(hidden, self.head.weight, bias)


def start(model, degrees, optimizer=torch.optim.AdamW, **options):
    engine = Engine(parallelism=ParallelismConfig(**degrees))
    built = optimizer(model.parameters(), lr=0.05, **options)
    model, built = engine.prepare(model, built, None, None)[:2]
    assert any(isinstance(p, DTensor) for p in model.parameters()) == ("dp_shard" in degrees)
    return engine, model, built


def run(degrees, optimizer):
    torch.set_default_dtype(torch.float64)
    model = TinyModel()
    engine, model, optimizer = start(model, degrees, optimizer)
    ema = Ema(model, optimizer, EMAConfig(decay=0.6))
    x, y = data()
    trail = []
    for step in range(STEPS):
        mine = slice(step * ROWS + engine.rank, (step + 1) * ROWS, engine.topology.world_size)
        engine.step(model, optimizer, None, [(x[mine], y[mine])], squared)
        before = values(model)
        with ema.averaged():
            trail.append((before, values(model)))
            inside = evaluate_loss(engine, model, [(x[mine], y[mine])], squared).loss
        after = values(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        outside = evaluate_loss(engine, model, [(x[mine], y[mine])], squared).loss
        # A gathered copy of other weights must not survive the exchange.
        assert step == 0 or abs(inside - outside) > 1e-6
    return trail


OPTIMIZERS = (torch.optim.AdamW, torch.optim.SGD)


def run_each(degrees):
    return {optimizer: run(degrees, optimizer) for optimizer in OPTIMIZERS}


@functools.cache
def trails(layout):
    """Of rank 0, by optimizer, which share a launch."""
    world, degrees = LAYOUTS[layout]
    return run_ranks(run_each, world, degrees)[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_average_is_that_of_the_whole_weights(layout, optimizer):
    trail = trails(layout)[optimizer]
    average = None
    for update, (weights, found) in enumerate(trail, 1):
        decay = min(0.6, (1 + update) / (10 + update))
        average = (
            weights
            if average is None
            else {n: decay * average[n] + (1 - decay) * weights[n] for n in weights}
        )
        for name, value in average.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    assert not torch.equal(trail[-1][0]["head.weight"], trail[-1][1]["head.weight"])


def late_gradient():
    engine, model, optimizer = start(OnlyLater(), {})
    ema = Ema(model, optimizer, EMAConfig(decay=0.5, warmup=False))
    x, y = data(torch.float32)
    for step in range(STEPS):
        model.updates = step
        engine.step(model, optimizer, None, [(x[:ROWS], y[:ROWS])], squared)
        assert ("ema" in optimizer.state.get(model.head.bias, {})) == (step >= 2)
    ema.close()
    return True


def test_a_parameter_without_gradients_keeps_a_fresh_optimizer_state():
    assert run_ranks(late_gradient, 1) == [True]


def swapped_state():
    engine, model, optimizer = start(TinyModel(), {"dp_shard": -1})
    ema = Ema(model, optimizer, EMAConfig(decay=0.5))
    x, y = data(torch.float32)
    for _ in range(3):
        engine.step(model, optimizer, None, [(x, y)], squared)
    trained = values(model)
    with ema.averaged():
        average = values(model)
        # What a checkpoint of these moments would restore:
        line = resume_average(model, optimizer, ema)
        assert line is None
        assert all(torch.equal(v, trained[n]) for n, v in values(model).items())
        with ema.averaged():
            assert all(torch.equal(v, average[n]) for n, v in values(model).items())
    return True


def test_a_restored_exchange_is_undone():
    assert run_ranks(swapped_state, 2) == [True, True]


def narrow():
    _, model, optimizer = start(TinyModel().to(torch.bfloat16), {})
    with pytest.raises(ConfigError, match=r"embed.weight is kept in torch.bfloat16"):
        Ema(model, optimizer, EMAConfig(decay=0.9))
    return True


def test_weights_too_narrow_for_an_average_are_refused():
    assert run_ranks(narrow, 1) == [True]


class Noisy(nn.Module):
    """Dropout, and an inner module that its author keeps in evaluation mode."""

    _fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)
        self.kept = nn.Dropout(0.5).eval()

    def forward(self, x):
        out = self.linear(self.drop(x))
        return out + torch.randn_like(out)


def held_out(degrees, rows):
    torch.manual_seed(0)
    engine, model, _ = start(Noisy() if rows is None else TinyModel(), degrees)
    x, y = data(torch.float32)
    if rows is None:
        state = torch.get_rng_state()
        first, second = (evaluate_loss(engine, model, [(x, y)], squared) for _ in range(2))
        inner = getattr(model, "module", model)
        return (
            first == second,
            torch.equal(state, torch.get_rng_state()),
            inner.training and inner.drop.training and not inner.kept.training,
        )
    mine = list(range(rows))[engine.rank :: engine.topology.world_size]
    batches = [(x[mine], y[mine])] if mine else [(x[:1], y[:1])]
    report = evaluate_loss(engine, model, batches, squared, num_counted=1 if mine else 0)
    return report.loss, report.metrics["twice"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_on_held_out_rows_counts_each_row_once(layout):
    world, degrees = LAYOUTS[layout]
    rows = 3  # of which the fourth rank has none
    x, y = data(torch.float32)
    expected = (TinyModel()(x[:rows]) - y[:rows]).square().sum().item() / rows
    for loss, twice in run_ranks(held_out, world, degrees, rows):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert twice == pytest.approx(2 * expected, rel=1e-5)


def noisy_loss(degrees):
    torch.manual_seed(0)
    engine, model, _ = start(Noisy(), degrees)
    x, y = data(torch.float32)
    batches = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2)]
    mine = batches[engine.rank :: engine.topology.world_size]
    return evaluate_loss(engine, model, mine, squared, seed=5).loss


def test_noise_of_an_evaluation_does_not_depend_on_the_number_of_ranks():
    (alone,) = run_ranks(noisy_loss, 1, {})
    for layout in ("ddp", "fsdp", "hsdp"):
        world, degrees = LAYOUTS[layout]
        for loss in run_ranks(noisy_loss, world, degrees):
            assert loss == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("layout", ["single", "fsdp"])
def test_an_evaluation_leaves_no_trace_and_repeats_itself(layout):
    world, degrees = LAYOUTS[layout]
    assert run_ranks(held_out, world, degrees, None) == [(True, True, True)] * world
