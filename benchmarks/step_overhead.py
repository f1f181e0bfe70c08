"""Compare one update of the engine, of bare accelerate and of a loop in plain torch, on 2 ranks.

    python benchmarks/step_overhead.py               # DDP and FSDP2
    python benchmarks/step_overhead.py --kinds fsdp --rounds 100
    python benchmarks/step_overhead.py --profile     # also shows where the engine spends its time

The three train copies of one model in the same processes. They take turns, with one update each per
round, so other work of the machine slows all three in the same way. The time of a round is the time
of its slower rank. The program also prints the processor time of both ranks, which other programs
do not lengthen. It includes the work of gloo, but not the waiting. Every update is forward,
backward, clipping by the global norm, AdamW, a schedule, and the loss as a number. The engine also
averages the loss over the ranks, checks for values that are not finite before the update, and
checks the order of wrap units.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from parallel_config import AcceleratorConfig, FSDPConfig, ParallelismConfig
from parallel_engine import Engine
from parallel_engine.accelerate_build import build_accelerator
from parallel_engine.wrapping import only_with_size, resolve_wrap_policy, wrap_units
from parallel_testing.ranks import run_ranks

RANKS, CLIP_NORM, WARM_UP = 2, 1.0, 5
DEGREES = {"ddp": {}, "fsdp": {"dp_shard": RANKS}}
CONFIG = AcceleratorConfig(fsdp=FSDPConfig(wrap_modules=("TransformerEncoderLayer",)))
Update = Callable[[Tensor], float]
Times = dict[str, list[float]]
"""Seconds of each round, by way."""
WAYS = ("torch", "accelerate", "engine")
Parts = tuple[nn.Module, torch.optim.Optimizer, LambdaLR]


def build(width: int, depth: int) -> Parts:
    """A transformer encoder, AdamW and a schedule, with the same numbers every time."""
    torch.manual_seed(0)
    layers = (
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(depth)
    )
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, LambdaLR(optimizer, lambda n: 1 / (1 + n))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss: a 0-dim mean."""
    loss: Tensor = model(batch).square().mean()
    return loss


def by_torch(kind: str, parts: Parts) -> Update:
    """An update as people write it by hand in torch."""
    model, optimizer, scheduler = parts
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        scheduler = LambdaLR(optimizer, lambda n: 1 / (1 + n))

    def update(batch: Tensor) -> float:
        loss = loss_of(model, batch)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), CLIP_NORM)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    return update


def by_accelerate(kind: str, parts: Parts, engine: Engine) -> Update:
    """An update as accelerate documents it, on an Accelerator with the engine's settings."""
    accelerator = build_accelerator(CONFIG, engine.topology, engine.device)
    policy = resolve_wrap_policy(parts[0], CONFIG.fsdp) if kind == "fsdp" else None
    with only_with_size(parts[0], wrap_units(parts[0], policy).values() if policy else None):
        model, optimizer, scheduler = accelerator.prepare(*parts)

    def update(batch: Tensor) -> float:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.item()

    return update


def by_engine(parts: Parts, engine: Engine) -> Update:
    """An update of the engine."""
    model, optimizer, scheduler, _ = engine.prepare(*parts, None)

    def update(batch: Tensor) -> float:
        return engine.step(model, optimizer, scheduler, [batch], loss_of, clip_norm=CLIP_NORM).loss

    return update


def on_rank(
    kind: str, rounds: int, width: int, depth: int, tokens: int, profile: bool
) -> tuple[Times, Times, str]:
    """Collective: every rank. Return wall and processor seconds by way, and a profile.

    Raises:
        RuntimeError: the ways do not train with the same losses.
    """
    engine = Engine(
        parallelism=ParallelismConfig(**DEGREES[kind]), accelerator=CONFIG, device="cpu"
    )
    ways = {
        "torch": by_torch(kind, build(width, depth)),
        "accelerate": by_accelerate(kind, build(width, depth), engine),
        "engine": by_engine(build(width, depth), engine),
    }
    generator = torch.Generator().manual_seed(engine.rank)
    batch = torch.randn(4, tokens, width, generator=generator)
    wall: Times = {way: [] for way in ways}
    cpu: Times = {way: [] for way in ways}
    losses: dict[str, float] = {}
    names = list(ways)
    for number in range(-WARM_UP, rounds):
        shift = number % len(names)  # each way comes first equally often
        for way in names[shift:] + names[:shift]:
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            losses[way] = ways[way](batch)
            if number >= 0:
                wall[way].append(time.perf_counter() - began)
                cpu[way].append(time.process_time() - used)
    require_alike(losses)
    profiler = cProfile.Profile()
    for _ in range(rounds if profile else 0):
        profiler.runcall(ways["engine"], batch)
    text = io.StringIO()
    if profile:
        pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(45)
    return wall, cpu, text.getvalue()


def require_alike(losses: dict[str, float]) -> None:
    """Collective: every rank. The engine's loss must be the mean of the other ways' losses."""
    others = torch.tensor([losses["torch"], losses["accelerate"]], dtype=torch.float64)
    dist.all_reduce(others)
    for other in (others / RANKS).tolist():
        if abs(other - losses["engine"]) > 1e-5 * abs(other):
            raise RuntimeError(f"the ways do not train with the same losses: {losses}")


def main() -> None:
    """Run every kind and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=DEGREES, default=list(DEGREES))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    shape = (options.width, options.depth, options.tokens, options.profile)
    for kind in options.kinds:
        ranks = run_ranks(on_rank, RANKS, kind, options.rounds, *shape, init=False, timeout_s=1200)
        wall = {
            way: [max(r) for r in zip(*(w[way] for w, _, _ in ranks), strict=True)] for way in WAYS
        }
        cpu = {
            way: [sum(r) for r in zip(*(c[way] for _, c, _ in ranks), strict=True)] for way in WAYS
        }
        print(f"{kind} on {RANKS} ranks, {options.rounds} rounds, torch {torch.__version__}")
        report("wall", wall)
        report("processor", cpu)
        print(ranks[0][2], end="", flush=True)


def report(what: str, rounds: Times) -> None:
    """Print a line for each way: its median, its quartiles, and the engine's ratio to it."""
    median = statistics.median(rounds["engine"])
    for way, times in rounds.items():
        low, middle, high = (1e3 * q for q in statistics.quantiles(times, n=4))
        pairs = [e / t for e, t in zip(rounds["engine"], times, strict=True)]
        print(
            f"  {what:9} {way:10} {middle:8.1f} ms (quartiles {low:.1f} to {high:.1f})   engine is "
            f"{1e3 * median / middle:.3f} of it, by rounds {statistics.median(pairs):.3f}"
        )


if __name__ == "__main__":
    main()
