"""Sharded and whole parameters in one optimizer group, which torch's foreach and fused refuse."""

import logging

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_config import AcceleratorConfig, EMAConfig, FSDPConfig, ParallelismConfig
from parallel_engine import Ema, Engine
from parallel_engine.optimizers import inner_optimizer
from parallel_testing.ranks import run_ranks


class Model(nn.Module):
    _fsdp_wrap_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.body, self.whole = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.whole(self.body(x)).tanh() * self.gain


def adamw(**options):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def in_groups_of_their_own(model):
    groups = [list(model.body.parameters()), [*model.whole.parameters(), model.gain]]
    return torch.optim.AdamW([{"params": g} for g in groups], lr=0.1, foreach=True)


# What CUDA does by itself, CPU does where it is told to.
OPTIMIZERS = {
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "left to torch": adamw(),
    "plain": adamw(foreach=False),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True),
    "own groups": in_groups_of_their_own,
}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def trained(degrees, build, late):
    torch.manual_seed(0)
    model = Model()
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(fsdp=FSDPConfig(ignored_modules=("whole",))),
        device="cpu",
    )
    logger, heard = logging.getLogger("parallel_engine"), Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    given = build if late else build(model)
    model, optimizer, _, _ = engine.prepare(model, given, None, None)
    logger.removeHandler(heard)
    ema = Ema(model, optimizer, EMAConfig(decay=0.5))
    rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(engine.rank))
    if not engine.topology.is_sharded:
        rows = torch.cat(
            [torch.randn(2, 4, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
        )

    def loss_fn(m, x):
        return m(x).square().mean()

    for _ in range(3):
        engine.step(model, optimizer, None, [rows], loss_fn, clip_norm=0.1)
    with ema.averaged():
        parameters = list(model.parameters())
        values = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]
        values = [value.clone() for value in values]
    on = [
        group.get("foreach") or group.get("fused")
        for group in inner_optimizer(optimizer).param_groups
    ]
    return values, [line for line in heard.lines if "one by one" in line], on


def every(degrees):
    return {
        (name, late): trained(degrees, build, late)
        for name, build in OPTIMIZERS.items()
        for late in (False, True)
    }


def test_whole_and_sharded_parameters_train_in_one_group_as_on_one_process():
    (wanted,) = run_ranks(every, 1, {}, init=False)
    for rank, found in enumerate(run_ranks(every, 2, {"dp_shard": 2}, init=False)):
        for case, (values, lines, on) in found.items():
            for value, alone in zip(values, wanted[case][0], strict=True):
                torch.testing.assert_close(value, alone)
            is_mended = case[0] not in ("plain", "own groups")
            assert len(lines) == (is_mended and rank == 0), case
            assert all("optimizer.param_groups[0] hold sharded and whole" in line for line in lines)
            assert all(on) == (case[0] == "own groups"), case
