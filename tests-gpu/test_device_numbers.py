"""Numbers that a device computes its own way: attention, convolutions, TF32, fp16, copies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel_ckpt import CheckpointSaver, read_start, restore
from parallel_config import AcceleratorConfig, CompileConfig, ParallelismConfig
from parallel_engine import Engine, unwrap
from parallel_engine.loaders import to_device
from parallel_testing.ranks import run_ranks

KINDS = ("single", "ddp", "fsdp", "hsdp")
ROWS, WIDTH, HEADS, UPDATES = 8, 16, 2, 3


class Block(nn.Module):
    """Attention, causal and not, through torch's fused kernels."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A convolution over pictures, then attention over their places."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([Block(False), Block(True)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, pictures):
        x = torch.relu(self.conv(pictures)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def loss_fn(model, batch):
    pictures, wanted = batch
    return (model(pictures) - wanted).square().mean()


def build(device, degrees, **accelerator):
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(**accelerator),
        device=device,
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    assert sharded == engine.topology.is_sharded
    return engine, model, optimizer


def batch_of(engine, number):
    generator = torch.Generator().manual_seed(number)
    rows = (
        torch.randn(ROWS, 3, 8, 8, generator=generator),
        torch.randn(ROWS, 5, generator=generator),
    )
    return tuple(t.chunk(engine.topology.dp_world_size)[engine.rank] for t in rows)


def update(engine, model, optimizer, number):
    batch = batch_of(engine, number)
    return engine.step(model, optimizer, None, [batch], loss_fn, clip_norm=1.0)


def train(device, degrees, accelerator):
    engine, model, optimizer = build(device, degrees, **accelerator)
    reports = [update(engine, model, optimizer, number) for number in range(UPDATES)]
    return engine.topology.kind.value, [(r.loss, r.grad_norm) for r in reports]


def run(fn, world_size, device, *args):
    return run_ranks(fn, world_size, device, *args, init=False, device=device, timeout_s=240)


def require(kind, layouts, world_size):
    if kind == "single":
        return 1, {}
    if kind not in layouts:
        pytest.skip(f"{kind} cannot be shown on {world_size} rank(s)")
    return world_size, layouts[kind]


@pytest.fixture(scope="module")
def on_the_host():
    """The numbers of one process on the CPU."""
    return run(train, 1, "cpu", {}, {})[0][1]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_convolution(kind, device, layouts, world_size, on_the_host):
    """On every kind, and on another device, the numbers of one process on the host."""
    ranks, degrees = require(kind, layouts, world_size)
    # A convolution of cuDNN uses TF32 unless it is told not to: about three digits.
    rel = 1e-4 if device == "cpu" else 2e-2
    for found, numbers in run(train, ranks, device, degrees, {}):
        assert found == kind
        for mine, wanted in zip(numbers, on_the_host, strict=True):
            assert mine == pytest.approx(wanted, rel=rel)


@pytest.mark.parametrize("kind", KINDS)
def test_inductor(kind, cuda, layouts, world_size, on_the_host):
    """On the host a compiler may be missing, and the first run takes half a minute."""
    ranks, degrees = require(kind, layouts, world_size)
    compiled = {"compile": CompileConfig(enable=True, backend="inductor")}
    for found, numbers in run(train, ranks, cuda, degrees, compiled):
        assert found == kind
        for mine, wanted in zip(numbers, on_the_host, strict=True):
            assert mine == pytest.approx(wanted, rel=2e-2)


def attention_by(device, name):
    """Largest error of one backend of attention, forward and backward, against fp64."""
    # The kernel that needs the least takes fp32 too; the flash kernel of CUDA does not.
    dtype = torch.float32 if device == "cpu" or name != "FLASH_ATTENTION" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, 4, 64, 32, generator=generator).to(dtype) for _ in range(3)]
    found = []
    for place, kind, backend in (
        ("cpu", torch.float64, SDPBackend.MATH),
        (device, dtype, getattr(SDPBackend, name)),
    ):
        parts = [t.to(place, kind).requires_grad_() for t in exact]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*parts, is_causal=True)
        out.float().square().sum().backward()
        found.append([out, *(t.grad for t in parts)])
    pairs = zip(*found, strict=True)
    return max(float((a.cpu().float() - b.cpu().float()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_every_backend_of_attention(name, device):
    if device == "cpu" and name == "EFFICIENT_ATTENTION":
        pytest.skip("the host does not have this kernel")
    (error,) = run(attention_by, 1, device, name)
    # bf16 keeps 8 bits: of values around 4, and of gradients that are sums of some of them.
    assert error < (0.25 if device == "cuda" and name == "FLASH_ATTENTION" else 1e-2)


def errors_of_products(device):
    """Relative error of a matrix product as torch starts out, and under `tf32`."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    wanted, found = a @ b, []
    for _ in range(2):
        product = (a.to(device, torch.float32) @ b.to(device, torch.float32)).cpu().double()
        found.append(float((product - wanted).norm() / wanted.norm()))
        Engine(accelerator=AcceleratorConfig(tf32=True), device=device)
    return found


def test_tf32_rounds_on_a_device_and_nowhere_else(device):
    """10 bits of mantissa instead of 23. Devices older than Ampere do not have it."""
    ((exact, rounded),) = run(errors_of_products, 1, device)
    assert exact < 1e-5
    if device == "cpu":
        assert rounded < 1e-5
    else:
        assert 1e-5 < rounded < 1e-2


def fp16_and_a_resume(device, degrees, root):
    """(scale, loss) after each update of a run, and again from a checkpoint half way."""
    ends = []
    for resumed in (False, True):
        engine, model, optimizer = build(device, degrees, mixed_precision="fp16")
        if resumed:
            start = read_start(root, topology=engine.topology)
            restore(start.path, model, optimizer)
        with CheckpointSaver(root, topology=engine.topology, on_note=lambda line: None) as saver:
            rows = []
            for number in range(3 if resumed else 0, 6):
                report = update(engine, model, optimizer, number)
                rows.append((optimizer.scaler.get_scale(), report.loss, report.skipped))
                if number == 2 and not resumed:
                    optimizer.scaler.update(128.0)  # another one than it starts with
                    saver.save(step=3, samples_seen=24, model=model, optimizer=optimizer)
        ends.append(rows)
        dtypes = {p.dtype for p in unwrap(model).parameters()}
        assert dtypes == {torch.float32}
    return ends


@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_fp16_trains_and_resumes_with_its_scale(kind, cuda, layouts, world_size, tmp_path):
    ranks, degrees = require(kind, layouts, world_size)
    for whole, resumed in run(fp16_and_a_resume, ranks, cuda, degrees, tmp_path):
        assert [scale for scale, *_ in resumed] == [128.0] * 3
        assert not any(skipped for *_, skipped in resumed)
        for (_, mine, _), (_, wanted, _) in zip(resumed, whole[3:], strict=True):
            assert mine == pytest.approx(wanted, rel=1e-2)


def copies_to_the_host(device):
    """What the host reads at once of a tensor that the device still writes."""
    value = torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(200_000_000)  # about a tenth of a second
    value.fill_(1.0)
    return float(to_device({"x": value}, torch.device("cpu"))["x"].min())


def test_a_copy_to_the_host_is_waited_for(cuda):
    assert run(copies_to_the_host, 1, cuda) == [1.0]
