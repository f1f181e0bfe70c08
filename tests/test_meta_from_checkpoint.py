"""A model without memory, sharded, then filled from a checkpoint: engine and ckpt together."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallel_ckpt import CheckpointSaver, load_weights, restore
from parallel_config import CheckpointFormat, ParallelismConfig
from parallel_engine import Engine, parameters_on_meta, unwrap
from parallel_testing.models import OddModel
from parallel_testing.ranks import run_ranks

KINDS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"dp_shard": 2}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
BATCH = torch.linspace(-1, 1, 32).reshape(8, 4)


def make_optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def prepared(degrees, on_meta, fill=None):
    if on_meta:
        with parameters_on_meta():
            model = OddModel(unused=False, seed=None)
    else:
        model = OddModel(unused=False, seed=8)
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")
    parts = engine.prepare(model, make_optimizer, make_scheduler, None, fill=fill)
    return engine, *parts[:3]


def update(engine, model, optimizer, scheduler):
    each = len(BATCH) // engine.topology.dp_world_size
    mine = BATCH[engine.rank * each : (engine.rank + 1) * each]
    report = engine.step(model, optimizer, scheduler, [mine], lambda m, x: m(x).square().mean())
    return report.loss, report.grad_norm, report.lr


def whole(model):
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in unwrap(model).named_parameters()
    }


def save(degrees, folder, checkpoint_format):
    """Two updates, a checkpoint, and what comes after it."""
    engine, *parts = prepared(degrees, on_meta=False)
    for _ in range(2):
        update(engine, *parts)
    weights = whole(parts[0])
    saver = CheckpointSaver(folder, topology=engine.topology, checkpoint_format=checkpoint_format)
    with saver:
        saver.save(step=2, samples_seen=16, model=parts[0], optimizer=parts[1], scheduler=parts[2])
    return weights, [update(engine, *parts) for _ in range(3)]


def resume(degrees, folder):
    """Weights alone as the fill, then everything into a model that has no values yet."""
    *_, model, _, _ = prepared(degrees, True, lambda m: load_weights(m, folder))
    filled = whole(model)
    engine, *parts = prepared(degrees, True)
    restore(folder, *parts)
    cut = sum(isinstance(p, DTensor) for p in parts[0].parameters())
    return filled, whole(parts[0]), cut, [update(engine, *parts) for _ in range(3)]


@pytest.mark.parametrize(
    ("saved_by", "checkpoint_format", "resumed_by"),
    [
        ("single", CheckpointFormat.DCP, ["fsdp", "hsdp"]),
        ("fsdp", CheckpointFormat.SAFETENSORS, ["single", "ddp", "hsdp"]),
    ],
)
def test_other_kinds_go_on_from_meta(saved_by, checkpoint_format, resumed_by, tmp_path):
    world_size, degrees = KINDS[saved_by]
    weights, numbers = run_ranks(
        save, world_size, degrees, str(tmp_path), checkpoint_format, init=False
    )[0]
    for kind in resumed_by:
        world_size, degrees = KINDS[kind]
        for filled, restored, cut, found in run_ranks(
            resume, world_size, degrees, str(tmp_path), init=False, timeout_s=180
        ):
            assert (cut > 0) == ("dp_shard" in degrees), kind
            for name, value in weights.items():
                assert torch.equal(filled[name], value), (kind, name)
                assert torch.equal(restored[name], value), (kind, name)
            for one, other in zip(found, numbers, strict=True):
                assert one == pytest.approx(other, rel=1e-5), kind
