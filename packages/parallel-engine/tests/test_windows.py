"""Windows that go wrong, are odd, or are built from the engine's pieces."""

import logging

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from parallel_config import (
    AcceleratorConfig,
    ConfigError,
    GradientAccumulationConfig,
    ParallelismConfig,
)
from parallel_engine import Engine, NonFiniteError
from parallel_testing.ranks import rank_outcomes, run_ranks

KINDS = {"single": (1, {}), "ddp": (2, {}), "fsdp": (2, {"dp_shard": 2})}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("in backward")


class Model(nn.Module):
    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 1)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x, how="well"):
        for index, block in enumerate(self.blocks):
            if how == "skips" and index == 1:
                continue
            x = block(x)
            if how == "fails" and index == 1:
                raise MemoryError("in forward")
            if how == "fails in backward" and index == 1:
                x = FailsInBackward.apply(x)
        if how == "nan":
            x = x * float("nan")
        return (self.head(x) * self.gain).mean()


def prepared(degrees, accumulation=1, lr=0.0, **knobs):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    steps = GradientAccumulationConfig(steps=accumulation)
    config = AcceleratorConfig(gradient_accumulation=steps)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees), accelerator=config, device="cpu", **knobs
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    assert any(isinstance(p, DTensor) for p in model.parameters()) == engine.topology.is_sharded
    return engine, model, optimizer


def loss_fn(model, batch):
    return model(*batch)


def rows(rank=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1 + rank))


def norms_around(degrees, bad):
    """Gradient norm before and after a window of which the second micro-batch goes wrong."""
    engine, model, optimizer = prepared(degrees, accumulation=2)
    good = (rows(engine.rank), "well")
    found = [engine.step(model, optimizer, None, [good, good], loss_fn).grad_norm]
    try:
        engine.step(model, optimizer, None, [good, (good[0], bad)], loss_fn)
    except (MemoryError, NonFiniteError) as error:
        found.append(str(error))
    for _ in range(2):
        try:
            found.append(engine.step(model, optimizer, None, [good, good], loss_fn).grad_norm)
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["fails", "nan"])
def test_after_an_error_the_next_window_starts_from_nothing(kind, bad):
    world_size, degrees = KINDS[kind]
    for before, error, *after in run_ranks(norms_around, world_size, degrees, bad, init=False):
        assert error in ("in forward",) or "not finite" in error
        assert after == [before, before]


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_that_broke_off_is_the_end_of_a_launch_but_not_of_one_process(kind):
    world_size, degrees = KINDS[kind]
    results = run_ranks(norms_around, world_size, degrees, "fails in backward", init=False)
    for before, error, *after in results:
        assert error == "in backward"
        if kind == "single":
            assert after == [before, before]
        else:
            assert all("a backward pass broke off" in text for text in after)


def skips_in_the_last_micro_batch():
    engine, model, optimizer = prepared({}, accumulation=2)
    x = rows(engine.rank)
    engine.step(model, optimizer, None, [(x, "well"), (x, "skips")], loss_fn)


def test_ddp_misses_a_parameter_that_only_the_last_micro_batch_leaves_out():
    """Its gradient is there, from the first one, but the bucket was never reduced."""
    for outcome in rank_outcomes(skips_in_the_last_micro_batch, 2, init=False):
        assert outcome.error_type in ("UnusedParametersError", "PeerError")
        assert "2 trainable parameters did not take part in the loss" in outcome.error
        assert "blocks.1.linear.weight, blocks.1.linear.bias" in outcome.error


def updates_from_pieces(degrees, clips):
    engine, model, optimizer = prepared(degrees, accumulation=2, lr=0.5)
    for _ in range(3):
        for index in range(2):
            with engine.micro_batch(model, index, 2):
                engine.backward(model(rows(index + 2 * engine.rank)) / 2)
        if clips:
            engine.clip(model, clip_norm=None)
        engine.update(optimizer, None)
    weights = dict(model.named_parameters())
    return {
        name.removeprefix("module."): (w.full_tensor() if isinstance(w, DTensor) else w).detach()
        for name, w in weights.items()
    }


@pytest.mark.parametrize("clips", [False, True])
def test_a_loop_of_ones_own_needs_no_clip(clips):
    """The 0-dim gain is whole on every rank; its gradient is averaged all the same."""
    ranks = run_ranks(updates_from_pieces, 2, {"dp_shard": 2}, clips, init=False)
    wanted = run_ranks(updates_from_pieces, 2, {}, True, init=False)[0]
    for weights in ranks:
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value)


def other_units_from_pieces():
    engine, model, _ = prepared({"dp_shard": 2})
    with engine.micro_batch(model, 0, 1):
        for block in reversed(model.blocks) if engine.rank else model.blocks:
            block(rows())


def test_a_loop_of_ones_own_has_its_order_of_units_compared():
    for outcome in rank_outcomes(other_units_from_pieces, 2, init=False):
        assert outcome.error_type == "UnitOrderError"
        assert "at place 0 rank 0 ran 'blocks.0', rank 1 'blocks.2'" in outcome.error


def one_report(batch, loss_fn):
    engine, model, optimizer = prepared({})
    return engine.step(model, optimizer, None, [batch], loss_fn)


def test_a_batch_is_empty_when_none_of_its_tensors_has_rows():
    def mean(model, batch):
        return model(batch["x"]), {"seen": 1}

    no_boxes = {"boxes": torch.zeros(0, 4), "x": rows()}
    full = one_report(no_boxes, mean)
    assert full.grad_norm > 0
    assert full.metrics == {"seen": 1.0}
    empty = one_report({"boxes": torch.zeros(0, 4), "x": rows()[:0]}, mean)
    assert (empty.loss, empty.grad_norm, empty.metrics) == (0.0, 0.0, {})


def test_metrics_are_numbers_of_any_kind():
    def measured(model, batch):
        return model(batch), {"a": 2.5, "b": 3, "c": torch.ones(1), "d": torch.tensor(True)}

    assert one_report(rows(), measured).metrics == {"a": 2.5, "b": 3.0, "c": 1.0, "d": 1.0}
    for value, shown in ((torch.ones(2), r"\[2\]"), ("good", "'good'"), (None, "None")):
        with pytest.raises(
            TypeError, match=f"the metric 'm' = {shown}, but a metric is one number"
        ):
            one_report(rows(), lambda model, batch, v=value: (model(batch), {"m": v}))


class Epochs:
    """A loader with epochs of its own."""

    def __init__(self):
        self.seen = []

    def set_epoch(self, epoch):
        self.seen.append(epoch)

    def __iter__(self):
        return iter([torch.ones(1), torch.ones(1)])


class EpochBatches(BatchSampler):
    is_parallel_sampler = True

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def set_epoch(self, epoch):
        self.seen.append(epoch)


def take(windows, count):
    return [next(windows) for _ in range(count)]


def test_every_pass_over_a_loader_has_its_number():
    engine = Engine(device="cpu")
    own, sampler = Epochs(), EpochBatches(RandomSampler(range(2)), 1, False)
    loader = DataLoader(TensorDataset(torch.ones(2, 1)), batch_sampler=sampler)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    *_, prepared_own = engine.prepare(model, optimizer, None, own)
    take(engine.accumulate(prepared_own, epochs=None), 5)
    take(engine.accumulate(prepared_own, epochs=None, first_epoch=7), 3)
    assert own.seen == [0, 1, 2, 7, 8]
    engine = Engine(device="cpu")
    *_, prepared_loader = engine.prepare(model, optimizer, None, loader)
    take(engine.accumulate(prepared_loader, epochs=None), 5)
    assert sampler.seen == [0, 1, 2]
    assert len(prepared_loader.dataset) == 2


def test_a_loader_that_runs_once_is_told_from_an_empty_one():
    engine = Engine(device="cpu")
    with pytest.raises(ConfigError, match="yields no batch on this rank"):
        next(engine.accumulate([]))
    windows = engine.accumulate((torch.ones(1) for _ in range(2)), epochs=None)
    take(windows, 2)
    with pytest.raises(ConfigError, match="as a generator does, which runs once"):
        next(windows)


class Batch:
    """Like a tokenizer's: no Mapping that survives being rebuilt, but it moves itself."""

    moved_to = None

    def to(self, device):
        self.moved_to = device
        return self


def test_micro_batches_move_when_they_are_taken():
    engine = Engine(device="cpu")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [Batch(), Batch()]
    config = AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(steps=2))
    engine = Engine(accelerator=config, device="cpu")
    *_, loader = engine.prepare(model, optimizer, None, batches)
    window = next(engine.accumulate(loader))
    assert len(window) == 2
    assert window[1] is batches[1]
    assert [batch.moved_to for batch in batches] == [None, torch.device("cpu")]
    assert [batch.moved_to for batch in window[:1]] == [torch.device("cpu")]


def reads_a_broken_frame():
    engine, model, optimizer = prepared({})

    def batches():
        yield rows(), "well"
        if engine.rank == 1:
            raise OSError("frame 17 cannot be decoded")
        yield rows(), "well"

    for window in engine.accumulate(batches()):
        engine.step(model, optimizer, None, window, loss_fn)


def test_what_a_loader_raises_is_told_to_the_other_ranks():
    first, second = rank_outcomes(reads_a_broken_frame, 2, init=False)
    assert (first.error_type, second.error_type) == ("PeerError", "OSError")
    assert "rank 1 failed: OSError: frame 17 cannot be decoded" in first.error


def with_fp16_scaler(on_nonfinite):
    """CUDA's fp16 without CUDA: torch's scaler works on CPU, and accelerate asks its state."""
    engine, model, optimizer = prepared({}, lr=0.1, on_nonfinite=on_nonfinite)
    scaler = torch.amp.GradScaler("cpu")
    engine.accelerator.scaler = scaler
    engine.accelerator.state._mixed_precision = "fp16"
    engine.accelerator.native_amp = True
    scaled = AcceleratedOptimizer(optimizer.optimizer, device_placement=False, scaler=scaler)
    engine.accelerator._optimizers = [scaled]
    return engine, model, scaled, scaler


def test_a_loop_of_ones_own_may_clip_by_accelerate():
    engine, model, optimizer, _ = with_fp16_scaler("error")
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with engine.micro_batch(model, 0, 1):
            engine.backward(model(rows()))
        engine.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        engine.update(optimizer, None)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Overflow(torch.autograd.Function):
    """Its gradient is infinite while the scale is above a limit, as in fp16."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        too_large = gradient.abs().max() > ctx.limit
        return (gradient * float("inf") if too_large else gradient), None


def test_overflows_of_the_scaler_pass_until_it_has_found_its_scale(caplog):
    engine, model, optimizer, scaler = with_fp16_scaler("error")

    def overflows(model, x):
        return Overflow.apply(model(x), 2.0**12)

    with caplog.at_level(logging.INFO, "parallel_engine"):
        reports = [engine.step(model, optimizer, None, [rows()], overflows) for _ in range(6)]
    assert [report.skipped for report in reports] == [True] * 4 + [False] * 2
    assert scaler.get_scale() == 2.0**12
    assert engine.num_skipped == 4
    assert caplog.text.count("gradients overflow fp16") == 4
    wanted = prepared({})
    plain = wanted[0].step(wanted[1], wanted[2], None, [(rows(),)], loss_fn)
    assert reports[4].grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)


def test_gradients_that_no_scale_mends_are_an_error_under_fp16_too():
    engine, model, optimizer, _ = with_fp16_scaler("error")

    def never(model, x):
        return Overflow.apply(model(x), 0.0)

    for _ in range(32):
        assert engine.step(model, optimizer, None, [rows()], never).skipped
    with pytest.raises(NonFiniteError):
        engine.step(model, optimizer, None, [rows()], never)
    assert engine.num_skipped == 33


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale():
    engine, model, optimizer, _ = with_fp16_scaler("error")
    bad, good = [(rows(), "nan")], [(rows(), "well")]
    with pytest.raises(NonFiniteError, match="loss = nan"):
        engine.step(model, optimizer, None, bad, loss_fn)
    assert not engine.step(model, optimizer, None, good, loss_fn).skipped
    engine, model, optimizer, _ = with_fp16_scaler("skip")
    before = [p.detach().clone() for p in model.parameters()]
    report = engine.step(model, optimizer, None, bad, loss_fn)
    assert report.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not engine.step(model, optimizer, None, good, loss_fn).skipped


def test_a_scheduler_that_wants_a_metric_is_refused_before_the_first_update():
    for late in (False, True):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        scheduler = (lambda o, p=plateau: p(o)) if late else plateau(optimizer)
        with pytest.raises(ConfigError, match="ReduceLROnPlateau, which needs a metric"):
            Engine(device="cpu").prepare(model, optimizer, scheduler, None)


def strides_of_a_convolution(degrees):
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last))
    model._fsdp_wrap_modules = ("Conv2d",)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    batch = torch.ones(2, 3, 5, 5).to(memory_format=torch.channels_last)
    report = engine.step(model, optimizer, None, [batch], lambda m, x: m(x).mean())
    return next(model.parameters()).stride(), report.grad_norm


def test_channels_last_stays_where_nothing_is_cut():
    found = {
        kind: run_ranks(strides_of_a_convolution, n, degrees, init=False)[0]
        for kind, (n, degrees) in KINDS.items()
    }
    assert [stride for stride, _ in found.values()] == [(27, 1, 9, 3)] * 2 + [(27, 9, 3, 1)]
    norms = [norm for _, norm in found.values()]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def precision_after_an_engine(config):
    """What an engine of this config leaves of switches that the process had set before."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    Engine(accelerator=config, device="cpu")
    found = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    return *found, torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()


def test_switches_of_the_process_are_the_configs_or_stay_as_they_are(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for config, wanted in [
        (AcceleratorConfig(), ("high", True, True, False)),
        (AcceleratorConfig(tf32=False), ("highest", False, True, False)),
        (AcceleratorConfig(cudnn_benchmark=False), ("high", True, False, False)),
        (AcceleratorConfig(deterministic=True), ("high", True, False, True)),
    ]:
        try:
            assert precision_after_an_engine(config) == wanted
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
            torch.set_float32_matmul_precision("highest")
