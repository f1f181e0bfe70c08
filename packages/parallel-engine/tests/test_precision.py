"""The configured precision is really in force, on every kind and device."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import AcceleratorConfig, FSDPConfig, ParallelismConfig
from parallel_engine import Engine
from parallel_testing.ranks import run_ranks

KINDS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"dp_shard": -1}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


class Block(nn.Module):
    """Records the dtype it computes in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.linear(x)
        self.seen = hidden.dtype
        return torch.tanh(hidden)


class Net(nn.Module):
    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.frozen(self.block(x)))


def train(degrees, precision, reduce_dtype="fp32", loaded_in=torch.bfloat16, lr=1e-5):
    """(computed in, dtypes of masters, gradients, state, frozen weights, numbers)."""
    torch.manual_seed(0)
    model = Net().to(loaded_in)
    block, optimizer = model.block, torch.optim.AdamW(model.parameters(), lr=lr)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(
            mixed_precision=precision, fsdp=FSDPConfig(reduce_dtype=reduce_dtype)
        ),
        device="cpu",
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = set()
    optimizer.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(p.grad.dtype for p in trained)
    )
    generator = torch.Generator().manual_seed(engine.rank)
    x = torch.randn(4, 8, generator=generator).to(loaded_in)
    numbers = []
    for _ in range(8):
        report = engine.step(model, optimizer, None, [x], lambda m, b: m(b).float().square().mean())
        numbers.append((report.loss, report.grad_norm))
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in trained]
    state = {t.dtype for s in optimizer.state.values() for t in s.values() if t.ndim}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    return {
        "compute": str(block.seen),
        "masters": {str(p.dtype) for p in trained},
        "gradients": {str(d) for d in gradients},
        "state": {str(d) for d in state},
        "frozen": {str(d) for d in frozen},
        "numbers": numbers,
        "weights": torch.cat([p.detach().double().flatten() for p in whole]).tolist(),
    }


def train_all(degrees):
    """Under bf16 from weights in bf16, and without; the latter also in fp64."""
    return {
        "bf16": train(degrees, "bf16"),
        "no": train(degrees, "no", loaded_in=torch.float32),
        "fp64": train(degrees, "no", loaded_in=torch.float64),
        "reduced_in_bf16": train(degrees, "bf16", "bf16"),
    }


@pytest.fixture(scope="module")
def results():
    return {
        kind: run_ranks(train_all, world_size, degrees, init=False, timeout_s=200)
        for kind, (world_size, degrees) in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_computes_in_bf16_on_masters_in_fp32(results, kind):
    for ranks in results[kind]:
        found = ranks["bf16"]
        assert found["compute"] == "torch.bfloat16"
        assert found["masters"] == {"torch.float32"}
        assert found["gradients"] == {"torch.float32"}
        assert found["state"] == {"torch.float32"}
        assert found["frozen"] == {"torch.bfloat16"}


@pytest.mark.parametrize("kind", KINDS)
def test_updates_below_the_resolution_of_bf16_count(results, kind):
    """A rate of 1e-5 moves no weight in bf16; 8 updates in fp32 move them all."""
    weights = torch.tensor(results[kind][0]["bf16"]["weights"])
    assert (weights != weights.bfloat16().double()).float().mean() > 0.9


def test_ddp_and_fsdp_agree_as_far_as_bf16_goes(results):
    for found, wanted in zip(
        results["fsdp"][0]["bf16"]["numbers"], results["ddp"][0]["bf16"]["numbers"], strict=True
    ):
        assert found == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize(("case", "dtype"), [("no", "torch.float32"), ("fp64", "torch.float64")])
@pytest.mark.parametrize("kind", KINDS)
def test_without_mixed_precision_everything_keeps_its_dtype(results, kind, case, dtype):
    for ranks in results[kind]:
        found = ranks[case]
        assert found["compute"] == dtype
        for part in ("masters", "gradients", "state", "frozen"):
            assert found[part] == {dtype}


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_the_dtype_of_the_reduction_changes_the_numbers(results, kind):
    """By default gradients are summed in fp32; asked for, in bf16."""
    wide, narrow = results[kind][0]["bf16"], results[kind][0]["reduced_in_bf16"]
    assert wide["numbers"][0][0] == narrow["numbers"][0][0]
    assert wide["numbers"][0][1] != narrow["numbers"][0][1]
    assert wide["numbers"][0][1] == pytest.approx(narrow["numbers"][0][1], rel=2e-2)


class Classifier(nn.Module):
    """Its loss is computed inside, and by a declared method, or outside from its logits."""

    _fsdp_wrap_modules = ("Block",)
    _fsdp_forward_methods = ("compute_loss",)

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(8, 500)

    def forward(self, batch):
        return self.head(self.block(batch["x"]))

    def compute_loss(self, batch):
        assert batch["at"].dtype == torch.float32
        logits = self.head(self.block(batch["x"]))
        return nn.functional.cross_entropy(logits, batch["y"]), {"logits": logits}


def losses(degrees):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(mixed_precision="bf16"),
        device="cpu",
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    assert any(isinstance(p, DTensor) for p in model.parameters()) == engine.topology.is_sharded
    x, y = torch.randn(16, 8), torch.arange(16)
    batch = {"x": x, "y": y, "at": torch.full((16,), 1.001)}
    with torch.no_grad():
        logits = model(batch)
        outside = nn.functional.cross_entropy(logits, y)
        inside, found = model.compute_loss(batch)
    dtypes = {str(t.dtype) for t in (logits, outside, inside, found["logits"])}
    report = engine.step(model, optimizer, None, [batch], lambda m, b: m.compute_loss(b)[0])
    return dtypes, float(outside), float(inside), report.loss


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_computed_in_fp32_wherever_it_is(kind):
    world_size, degrees = KINDS[kind]
    wanted = run_ranks(losses, 1, {}, init=False)[0]
    for dtypes, *numbers in run_ranks(losses, world_size, degrees, init=False):
        assert dtypes == {"torch.float32"}
        # bf16 would round a loss near 6 to a multiple of 0.03.
        assert numbers == pytest.approx(wanted[1:], rel=1e-4)
