"""Models without memory: sharded first, filled in place, equal to models that had it all along."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_config import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    CompileConfig,
    ConfigError,
    FSDPConfig,
    ParallelismConfig,
    Topology,
)
from parallel_engine import Engine, initialize, parameters_on_meta, unwrap
from parallel_engine.accelerate_build import build_accelerator
from parallel_engine.wrapping import only_with_size, resolve_wrap_policy, wrap_units
from parallel_testing.models import OddModel
from parallel_testing.ranks import rank_outcomes, run_ranks

KINDS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"dp_shard": 2}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
WIDTH = 6


class Block(nn.Module):
    """A unit with attention, whose initialization is its own, and rows that do not divide."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Linear(WIDTH, 7)
        self.back = nn.Linear(7, WIDTH)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.back(torch.tanh(self.mlp(self.norm(x))))


class Model(nn.Module):
    """Blocks, a buffer of each sort, tied ends, a frozen layer and a 0-dim parameter."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("ramp", torch.linspace(1, 2, WIDTH), persistent=False)

    def reset_parameters(self):
        self.scale.fill_(1.5)

    def forward(self, x):
        x = self.frozen(self.embed(x))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.head(x * self.ramp) * self.scale


class WithReset(Model):
    """Knows how to compute its buffer again."""

    def reset_buffers(self):
        self.ramp.copy_(torch.linspace(1, 2, WIDTH))


BUILD = {
    "real": Model,
    "parameters_on_meta": lambda: in_context(parameters_on_meta(), Model),
    "meta": lambda: in_context(torch.device("meta"), WithReset),
}


def in_context(context, build):
    with context:
        return build()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def stored_weights():
    torch.manual_seed(5)
    model = Model()
    model.norm.running_mean += torch.rand(WIDTH)
    return model.state_dict()


def from_state(model):
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, stored_weights(), options=options)


FILLS = {"initialize": initialize, "state": from_state}


def trained(degrees, built, fill, config=None):
    """(loss, norm) of a few updates, the values before them, and what is cut and tied."""
    if dist.is_initialized():
        torch.manual_seed(100 + dist.get_rank())  # ranks need not agree on random numbers
    torch.manual_seed(3 if not dist.is_initialized() or dist.get_rank() == 0 else 99)
    with torch.random.fork_rng():
        model = BUILD[built]()
    on_meta = sum(p.is_meta for p in model.parameters())
    engine = Engine(parallelism=ParallelismConfig(**degrees), accelerator=config, device="cpu")
    model, optimizer, scheduler, _ = engine.prepare(
        model, make_optimizer, make_scheduler, None, fill=FILLS[fill]
    )
    inner = unwrap(model)
    values = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in [*inner.named_parameters(), *inner.named_buffers()]
    }
    torch.manual_seed(0)
    batches = torch.randn(3, 1, 8, 3, WIDTH)
    each = 8 // engine.topology.dp_world_size
    mine = batches[:, :, engine.rank * each : (engine.rank + 1) * each]
    model.eval()  # batch statistics of a part are not those of the whole
    reports = [
        engine.step(model, optimizer, scheduler, list(b), lambda m, x: m(x).square().mean())
        for b in mine
    ]
    cut = sum(isinstance(p, DTensor) for p in inner.parameters())
    tied = inner.head.weight is inner.embed.weight
    return on_meta, cut, tied, values, [(r.loss, r.grad_norm, r.lr) for r in reports]


BUILT_AND_FILLED = [("parameters_on_meta", "initialize"), ("meta", "state")]


def trained_each_way(degrees, ways):
    return {way: trained(degrees, *way) for way in ways}


@functools.cache
def references():
    """Models that had their memory from the beginning, in one process."""
    return run_ranks(trained_each_way, 1, {}, [("real", fill) for fill in FILLS], init=False)[0]


def reference(fill):
    return references()["real", fill]


@functools.cache
def trained_on(kind):
    """By rank, then by way; both ways of a kind share a launch."""
    world_size, degrees = KINDS[kind]
    return run_ranks(trained_each_way, world_size, degrees, BUILT_AND_FILLED, init=False)


@ALL_KINDS
@pytest.mark.parametrize(("built", "fill"), BUILT_AND_FILLED)
def test_values_and_updates_are_those_of_a_model_with_memory(kind, built, fill):
    _, degrees = KINDS[kind]
    _, _, _, wanted, numbers = reference(fill)
    for ways in trained_on(kind):
        on_meta, cut, tied, values, found = ways[built, fill]
        assert on_meta == len(list(Model().parameters()))
        assert cut == (on_meta - 1 if "dp_shard" in degrees else 0)
        assert tied
        assert values.keys() == wanted.keys()
        for name, value in values.items():
            assert torch.equal(value, wanted[name]), name
        for one, other in zip(found, numbers, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_the_reference_is_the_stored_state():
    values = reference("state")[3]
    for name, value in stored_weights().items():
        assert torch.equal(values.get(name, values["embed.weight"]), value)


def test_a_fill_also_serves_a_sharded_model_with_memory():
    _, _, tied, values, _ = run_ranks(trained, 2, {"dp_shard": 2}, "real", "state")[1]
    assert tied
    for name, value in reference("state")[3].items():
        assert torch.equal(values[name], value), name


def test_drawn_values_are_those_that_building_draws():
    """Modules are reset in the order in which they are built, the tied head apart."""

    def build():
        torch.manual_seed(11)
        return nn.Sequential(Block(), nn.Linear(WIDTH, 3), Block())

    built = build().state_dict()
    torch.manual_seed(11)
    with parameters_on_meta():
        model = nn.Sequential(Block(), nn.Linear(WIDTH, 3), Block())
    before = torch.get_rng_state()
    model.to_empty(device="cpu")
    initialize(model)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, built[name]), name


CONFIGS = {
    "checkpointing": AcceleratorConfig(
        activation_checkpointing=ActivationCheckpointingConfig(mode="full")
    ),
    "compile": AcceleratorConfig(compile=CompileConfig(enable=True, backend="eager")),
    "offload": AcceleratorConfig(fsdp=FSDPConfig(cpu_offload=True)),
    "ignored": AcceleratorConfig(fsdp=FSDPConfig(ignored_modules=("frozen",))),
    "by size": AcceleratorConfig(fsdp=FSDPConfig(min_num_params=200)),
}


def trained_with_each_knob():
    found = {}
    for name, config in CONFIGS.items():
        found[name] = trained({"dp_shard": 2}, "parameters_on_meta", "initialize", config)
    return found


@functools.cache
def with_each_knob():
    """What rank 1 found; the knobs share a launch."""
    return run_ranks(trained_with_each_knob, 2, init=False, timeout_s=200)[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_with_every_knob_of_sharding(name):
    _, _, _, wanted, numbers = reference("initialize")
    result = with_each_knob()[name]
    assert result[1] > 10
    values = {n.replace("_checkpoint_wrapped_module.", ""): v for n, v in result[3].items()}
    assert all(torch.equal(value, wanted[n]) for n, value in values.items())
    for one, other in zip(result[4], numbers, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor with memory that any operation makes."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not isinstance(out, DTensor) and not out.is_meta:
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


def largest_allocation(kind):
    wide, depth = 64, 6
    with parameters_on_meta():
        model = nn.Sequential(*(nn.Linear(wide, wide) for _ in range(depth)))
    engine = Engine(
        parallelism=ParallelismConfig(**KINDS[kind][1]),
        accelerator=AcceleratorConfig(fsdp=FSDPConfig(wrap_modules=("Linear",))),
        device="cpu",
    )
    with Largest() as seen:
        model, *_ = engine.prepare(model, make_optimizer, None, None, fill=initialize)
    held = sum(p.to_local().numel() for p in model.parameters())
    return seen.num_bytes, held, 4 * wide * wide, depth * (wide * wide + wide)


def test_no_rank_ever_holds_more_than_its_shards_and_one_module():
    for largest, held, one, whole in run_ranks(largest_allocation, 4, "hsdp", init=False):
        assert largest == one
        assert held == whole / 2


class Adagrad(torch.optim.Adagrad):
    """Makes its state in the constructor."""


def adagrad_state():
    with parameters_on_meta():
        model = Model()
    engine = Engine(parallelism=ParallelismConfig(dp_shard=2), device="cpu")
    model, optimizer, _, _ = engine.prepare(
        model, lambda m: Adagrad(m.parameters()), None, None, fill=initialize
    )
    engine.step(model, optimizer, None, [torch.ones(4, 3, WIDTH)], lambda m, x: m(x).mean())
    held = {id(p) for p in model.parameters()}
    return [
        (id(p) in held, isinstance(p, DTensor) == isinstance(s["sum"], DTensor), s["step"].item())
        for p, s in optimizer.state.items()
    ]


def test_an_optimizer_that_makes_its_state_at_once_sees_the_shards():
    state = run_ranks(adagrad_state, 2, init=False)[0]
    trained = [p.requires_grad for p in Model().parameters()]
    assert state == [(True, True, int(does)) for does in trained]


def left_out(degrees, what, deferred):
    """Fill all but some tensors, or but one row of them on the last rank; then one update."""
    with torch.device("meta"):
        model = Model()
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")

    def fill(model):
        kept = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if n in what}
        kept = {n: (t.to_local() if isinstance(t, DTensor) else t) for n, t in kept.items()}
        before = {n: t.clone() for n, t in kept.items()}
        initialize(model)
        for name, tensor in kept.items():
            rows = slice(1, 2) if tensor.ndim else ...  # a row is enough
            if engine.rank == engine.topology.world_size - 1:
                tensor.detach()[rows] = before[name][rows]

    prepared = engine.prepare(model, make_optimizer, None, None, fill=None if deferred else fill)
    if deferred:
        model, optimizer, _, _ = prepared
        fill(unwrap(model))
        batch = torch.ones(4, 3, WIDTH)
        engine.step(model, optimizer, None, [batch], lambda m, x: m(x).mean())


MISSING = (
    "model was built on the meta device, and nothing gave values to {}. Give engine.prepare a "
    "fill that writes them: parallel_ckpt.load_weights from a checkpoint, or "
    "parallel_engine.initialize."
)
LOST = (
    "model was built on the meta device, which lost its buffers {}; with persistent=False "
    "checkpoints do not hold them. Build the model under parallel_engine.parameters_on_meta(), or "
    "give their "
    "module a method reset_buffers() that computes them."
)


def errors_of(outcomes):
    return [o.error.rpartition(f"{o.error_type}: ")[2].strip() for o in outcomes]


@pytest.mark.parametrize("kind", ["single", "fsdp"])
def test_what_the_fill_left_out_is_named_on_every_rank(kind):
    world_size, degrees = KINDS[kind]
    names = ("blocks.1.mlp.weight", "norm.num_batches_tracked")
    outcomes = rank_outcomes(left_out, world_size, degrees, names, False, init=False)
    wanted = "\n".join([MISSING.format(", ".join(names)), LOST.format("ramp")])
    assert errors_of(outcomes) == [wanted] * world_size
    assert {o.error_type for o in outcomes} == {"ConfigError"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_values_may_come_after_prepare_but_before_the_first_micro_batch(kind):
    world_size, degrees = KINDS[kind]
    outcomes = rank_outcomes(left_out, world_size, degrees, ("scale",), True, init=False)
    wanted = "\n".join([MISSING.format("scale"), LOST.format("ramp")])
    assert errors_of(outcomes) == [wanted] * world_size


def filled_afterwards(degrees):
    with parameters_on_meta():
        model = Model()
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")
    model, optimizer, _, _ = engine.prepare(model, make_optimizer, None, None)
    initialize(unwrap(model))
    batch = torch.ones(4, 3, WIDTH)
    return engine.step(model, optimizer, None, [batch], lambda m, x: m(x).square().mean()).loss


def test_values_that_came_after_prepare_are_trained_on():
    losses = run_ranks(filled_afterwards, 2, {"dp_shard": 2}, init=False)
    assert losses[0] == losses[1] < float("inf")


def filled_differently(degrees):
    """What this rank holds after a fill that draws by itself, and the rank's place on the mesh."""
    with torch.device("meta"):
        model = WithReset()
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")

    def fill(model):
        generator = torch.Generator().manual_seed(engine.rank)
        for tensor in [*model.parameters(), *model.buffers()]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(10 * torch.rand(local.shape, generator=generator))

    model, *_ = engine.prepare(model, make_optimizer, None, None, fill=fill)
    model = unwrap(model)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for name, t in named
    }


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_replicas_begin_alike_whatever_a_fill_does(kind):
    world_size, degrees = KINDS[kind]
    held = run_ranks(filled_differently, world_size, degrees, init=False)
    parts = degrees.get("dp_shard", 1)
    for rank in range(parts, world_size):
        for name, value in held[rank % parts].items():
            assert torch.equal(value, held[rank][name]), (rank, name)
    if parts > 1:
        assert not torch.equal(held[0]["norm.weight"], held[1]["norm.weight"])
        assert torch.equal(held[0]["scale"], held[1]["scale"])


def refused(model, optimizer, scheduler=None):
    with pytest.raises(ConfigError) as error:
        Engine(device="cpu").prepare(model, optimizer, scheduler, None)
    return str(error.value)


def test_what_cannot_be_built_in_time_is_refused():
    with torch.device("meta"):
        model = Model()
    assert refused(model, make_optimizer(model)) == (
        "optimizer is a AdamW of parameters on the meta device, which are replaced when "
        "they get memory. Give a function that builds it: lambda model: AdamW(model.parameters())."
    )
    assert refused(model, make_optimizer, make_scheduler(make_optimizer(Model()))) == (
        "scheduler is a LambdaLR of another optimizer than the one that is built later. Give a "
        "function that builds it: lambda optimizer: LambdaLR(optimizer, ...)."
    )
    assert "optimizer is a Model, but Optimizer is needed." in refused(Model(), lambda m: m)
    other = make_optimizer(Model())
    assert "optimizer.param_groups[0] holds a parameter" in refused(Model(), lambda m: other)
    with torch.device("meta"):
        model.blocks[1].table = torch.ones(3)
    assert refused(model, make_optimizer) == (
        "model.blocks.1.table is a plain tensor on the meta device, so its values are lost. Make "
        "it a buffer, or build the model under parallel_engine.parameters_on_meta() instead of "
        "torch.device('meta')."
    )


def test_parameters_on_meta_keeps_buffers_ties_attributes_and_the_random_stream():
    before = torch.get_rng_state()
    with parameters_on_meta():
        model = OddModel(seed=None)
        linear = nn.Linear(3, 3)
        linear.weight.is_special = True
    drawn = torch.get_rng_state()
    assert all(p.is_meta for p in model.parameters())
    assert model.second_head.weight is model.head.weight
    assert not model.embed.weight.requires_grad
    assert torch.equal(model.scale, torch.linspace(1, 2, 8))
    assert linear.weight.is_special
    torch.set_rng_state(before)
    for shape in ((5,), (1,), (3, 7), ()):  # OddModel draws these itself
        torch.randn(shape)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not nn.Linear(2, 2).weight.is_meta


def accelerate_on_meta():
    with torch.device("meta"):
        model = Model()
    units = wrap_units(model, resolve_wrap_policy(model, FSDPConfig()))
    model.scale = None
    accelerator = build_accelerator(AcceleratorConfig(), Topology(dp_shard=2), torch.device("cpu"))
    optimizer = make_optimizer(model)
    with only_with_size(model, units.values()):
        _, optimizer = accelerator.prepare(model, optimizer)
    return len({id(p) for group in optimizer.param_groups for p in group["params"]})


def test_accelerate_loses_the_parameters_of_a_model_on_meta():
    """Once it does not, materialize.shard_alone need not hide the optimizer from it."""
    assert run_ranks(accelerate_on_meta, 2) == [1, 1]


def fails_on_rank_1(degrees, where):
    """Where another rank meanwhile is in a collective, of ours, accelerate's or the user's."""
    with parameters_on_meta():
        model = Hesitant() if where == "model" else Model()
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")

    def fail(here):
        if where == here and engine.rank == 1:
            raise OSError(5, "Input/output error", "model.safetensors")

    def fill(model):
        fail("fill")
        if "fill" in where:
            dist.broadcast_object_list(["a collective of a reader"], src=0)
        fail("fill, later")
        initialize(model)

    def optimizer(model):
        fail("optimizer")
        return make_optimizer(model)

    engine.prepare(model, optimizer, None, None, fill=fill)


class Hesitant(Model):
    """Cannot be moved by rank 1, which accelerate tries under DDP."""

    def to(self, *args, **kwargs):
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error", "model.safetensors")
        return super().to(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("ddp", "fill"),
        ("fsdp", "fill"),
        ("fsdp", "fill, later"),
        ("fsdp", "optimizer"),
        ("ddp", "model"),
    ],
)
def test_who_fails_between_collectives_of_prepare_is_named_on_every_rank(kind, where):
    world_size, degrees = KINDS[kind]
    outcomes = rank_outcomes(fails_on_rank_1, world_size, degrees, where, init=False)
    assert [o.error_type for o in outcomes] == ["PeerError", "OSError"]
    assert "rank 1 failed: OSError: [Errno 5] Input/output error" in outcomes[0].error
