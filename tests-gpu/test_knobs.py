"""Every knob and piece that works otherwise on a device than on the host, against a run without."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_ckpt import CheckpointSaver, load_weights, read_start, restore
from parallel_config import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CheckpointFormat,
    CompileConfig,
    EMAConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    ParallelismConfig,
)
from parallel_engine import (
    Ema,
    Engine,
    evaluate_loss,
    initialize,
    parameters_on_meta,
    resume_average,
    unwrap,
)
from parallel_testing.ranks import run_ranks

UPDATES, ROWS, WIDTH = 4, 8, 16
KINDS = ("single", "ddp", "fsdp", "hsdp")
KNOBS = {
    "plain": AcceleratorConfig(),
    "checkpointing": AcceleratorConfig(
        activation_checkpointing=ActivationCheckpointingConfig(mode="full")
    ),
    "compile": AcceleratorConfig(compile=CompileConfig(enable=True, backend="aot_eager")),
    "offload": AcceleratorConfig(fsdp=FSDPConfig(cpu_offload=True)),
    "kept gathered": AcceleratorConfig(fsdp=FSDPConfig(reshard_after_forward=False)),
    "synced": AcceleratorConfig(
        gradient_accumulation=GradientAccumulationConfig(steps=2, sync_each_batch=True)
    ),
    "bf16": AcceleratorConfig(mixed_precision="bf16"),
    "fp16": AcceleratorConfig(mixed_precision="fp16"),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """With a buffer, and a 0-dim parameter that no kind cuts."""

    _fsdp_wrap_modules = ("Block",)
    _fsdp_forward_methods = ("compute_loss",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def reset_parameters(self):
        nn.init.constant_(self.scale, 1.5)

    def forward(self, x):
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale

    def compute_loss(self, x, y):
        return (self(x) - y).square().mean()


def loss_fn(model, batch):
    return model.compute_loss(*batch)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch_of(engine, number):
    """Rows of a global batch for this rank, on the host: the engine moves them."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(ROWS, WIDTH + 5, generator=generator)
    mine = rows.chunk(engine.topology.dp_world_size)[engine.rank]
    return mine[:, :WIDTH], mine[:, WIDTH:]


def window(engine, number):
    steps = engine.config.gradient_accumulation.steps
    return list(zip(*(t.chunk(steps) for t in batch_of(engine, number)), strict=True))


def train(device, degrees, knob):
    """(kind, losses and norms, full weights) after a few clipped updates."""
    torch.manual_seed(3)
    model = Model()
    optimizer = make_optimizer(model)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees), accelerator=KNOBS[knob], device=device
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    assert any(isinstance(p, DTensor) for p in model.parameters()) == engine.topology.is_sharded
    reports = [
        engine.step(model, optimizer, None, window(engine, number), loss_fn, clip_norm=0.5)
        for number in range(UPDATES)
    ]
    kept = [r for r in reports if not r.skipped]
    return engine.topology.kind.value, [(r.loss, r.grad_norm) for r in kept], weights_of(model)


def weights_of(model):
    return {name: whole(p) for name, p in unwrap(model).state_dict().items()}


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().float().cpu().clone()


def run(fn, world_size, device, *args):
    return run_ranks(fn, world_size, device, *args, init=False, device=device, timeout_s=180)


def ranks_of(kind, layouts, world_size):
    if kind == "single":
        return 1, {}
    if kind not in layouts:
        pytest.skip(f"{kind} cannot be shown on {world_size} rank(s)")
    return world_size, layouts[kind]


@pytest.fixture(scope="module")
def reference(device):
    return run(train, 1, device, {}, "plain")[0]


def is_valid(kind, knob):
    """Offloading and keeping gathered mean something where parameters are cut, fp16 elsewhere."""
    is_cut = kind in ("fsdp", "hsdp")
    return is_cut if knob in ("offload", "kept gathered") else not (knob == "fp16" and is_cut)


PAIRS = [(kind, knob) for kind in KINDS for knob in KNOBS if knob != "plain"]


@pytest.mark.parametrize(("kind", "knob"), [pair for pair in PAIRS if is_valid(*pair)])
def test_a_knob_changes_no_number(kind, knob, device, layouts, world_size, reference):
    count, degrees = ranks_of(kind, layouts, world_size)
    if knob == "fp16" and device == "cpu":
        pytest.skip("fp16 is for CUDA")
    narrow = knob in ("bf16", "fp16")
    tolerance = 0.05 if narrow else 1e-4
    for found, numbers, weights in run(train, count, device, degrees, knob):
        assert found == kind
        if knob != "fp16":  # whose scaler leaves out the first updates
            for mine, wanted in zip(numbers, reference[1], strict=True):
                assert mine == pytest.approx(wanted, rel=tolerance)
        for name, wanted in reference[2].items():
            torch.testing.assert_close(weights[name], wanted, rtol=0, atol=0.08 if narrow else 1e-4)


def from_meta_to_a_resume(device, degrees, root):
    """Drawn shard by shard, averaged, evaluated, saved while training goes on, and taken up."""
    ends = []
    for resumed in (False, True):
        with parameters_on_meta():
            model = Model()
        engine = Engine(parallelism=ParallelismConfig(**degrees), device=device)
        start = read_start(root, topology=engine.topology) if resumed else None
        torch.manual_seed(3)
        fill = initialize if start is None else lambda m, s=start: load_weights(m, s.path)
        model, optimizer, _, _ = engine.prepare(model, make_optimizer, None, None, fill=fill)
        first = 0
        if start is not None:
            restore(start.path, model, optimizer)
            start.restore_rng()
            first = start.step
        ema = Ema(model, optimizer, EMAConfig(decay=0.5))
        if start is not None:
            resume_average(model, optimizer, ema)
        config = CheckpointConfig(async_save=True)
        saver = CheckpointSaver(
            root,
            topology=engine.topology,
            config=config,
            checkpoint_format=CheckpointFormat.SAFETENSORS_DCP,
            on_note=lambda line: None,
        )
        with saver:
            for number in range(first, UPDATES):
                engine.step(model, optimizer, None, window(engine, number), loss_fn)
                if not resumed and number == 1:
                    with ema.averaged():
                        saver.save(step=2, samples_seen=16, model=model, optimizer=optimizer)
        with ema.averaged():
            held_out = [batch_of(engine, number) for number in (98, 99)]
            loss = evaluate_loss(engine, model, held_out, loss_fn).loss
            average = weights_of(model)
        ema.close()
        sharded = any(isinstance(p, DTensor) for p in model.parameters())
        assert sharded == engine.topology.is_sharded
        ends.append((loss, average, weights_of(model)))
    return ends


@pytest.mark.parametrize("kind", KINDS)
def test_meta_average_evaluation_and_async_save(kind, device, layouts, world_size, tmp_path):
    count, degrees = ranks_of(kind, layouts, world_size)
    for went_on, resumed in run(from_meta_to_a_resume, count, device, degrees, tmp_path):
        assert resumed[0] == pytest.approx(went_on[0], rel=1e-6)
        for mine, wanted in zip(resumed[1:], went_on[1:], strict=True):
            for name in wanted:
                torch.testing.assert_close(mine[name], wanted[name], rtol=0, atol=1e-6)
        trained, average = went_on[2], went_on[1]
        assert not torch.equal(trained["head.weight"], average["head.weight"])
