"""Peak memory per rank while a model gets its values: built whole, or sharded first on meta.

    python benchmarks/memory_init.py                 # 4 ranks, a model of 0.9 GB
    python benchmarks/memory_init.py --ranks 2 --layers 20

Every way runs in its own processes, in turn. The peak is the largest private memory of the process
(its resident pages that do not belong to a file), less the memory that it had after its imports.
Two ways read a checkpoint. Its files do not count, because the system may drop their pages at any
time. The column "model/ranks + unit" compares the peak with this rank's part plus one wrap unit. A
way that never holds the whole model needs about that much.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from parallel_ckpt import load_weights, save_weights
from parallel_config import AcceleratorConfig, FSDPConfig, ParallelismConfig
from parallel_engine import Engine, initialize, parameters_on_meta
from parallel_testing.ranks import run_ranks

WIDTH = 2048


class Block(nn.Module):
    """A wrap unit of 33.6 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def build(num_layers: int) -> nn.Module:
    """A stack of blocks."""
    return nn.Sequential(*(Block() for _ in range(num_layers)))


class Peak(threading.Thread):
    """Samples the private memory of this process until `growth` is called."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.largest = private_bytes()
        self._ended = threading.Event()

    def run(self) -> None:
        """Sample every millisecond."""
        while not self._ended.wait(0.001):
            self.largest = max(self.largest, private_bytes())

    def growth(self) -> int:
        """Stop sampling; return the bytes of the peak above the start."""
        self._ended.set()
        self.join()
        return max(self.largest, private_bytes()) - self.before


def private_bytes() -> int:
    """Resident anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("RssAnon is missing in /proc/self/status")


def on_rank(way: str, num_layers: int, folder: str) -> tuple[int, float]:
    """Collective: every rank. Return (peak bytes, seconds) of one way on this rank."""
    torch.manual_seed(0)
    engine = Engine(
        parallelism=ParallelismConfig(dp_shard=-1),
        accelerator=AcceleratorConfig(fsdp=FSDPConfig(wrap_modules=("Block",))),
        device="cpu",
    )
    peak, started = Peak(), time.perf_counter()
    peak.start()
    WAYS[way](engine, num_layers, folder)
    return peak.growth(), time.perf_counter() - started


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer without state before its first step."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def whole_then_cut(engine: Engine, num_layers: int, folder: str) -> None:
    """Every rank builds the model, then keeps its part."""
    model = build(num_layers)
    engine.prepare(model, optimizer_of(model), None, None)


def meta_then_drawn(engine: Engine, num_layers: int, folder: str) -> None:
    """The model is sharded on meta, then values are drawn module by module."""
    with parameters_on_meta():
        model = build(num_layers)
    engine.prepare(model, optimizer_of, None, None, fill=initialize)


def whole_then_loaded(engine: Engine, num_layers: int, folder: str) -> None:
    """Every rank builds the model and loads the whole file, then keeps its part."""
    from safetensors.torch import load_file

    model = build(num_layers)
    model.load_state_dict(load_file(f"{folder}/model.safetensors"))
    engine.prepare(model, optimizer_of(model), None, None)


def meta_then_loaded(engine: Engine, num_layers: int, folder: str) -> None:
    """The model is sharded on meta, then each rank reads its own part of the file."""
    with parameters_on_meta():
        model = build(num_layers)
    engine.prepare(model, optimizer_of, None, None, fill=lambda m: load_weights(m, folder))


WAYS: dict[str, Callable[[Engine, int, str], None]] = {
    "built whole, then cut": whole_then_cut,
    "meta, then drawn": meta_then_drawn,
    "loaded whole, then cut": whole_then_loaded,
    "meta, then loaded": meta_then_loaded,
}


def main() -> None:
    """Run every way on its own ranks and print the peak of the largest rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    unit = 4 * 2 * (WIDTH * WIDTH + WIDTH)
    size = options.layers * unit
    with tempfile.TemporaryDirectory() as folder:
        save_weights(build(options.layers), Path(folder))
        found: dict[str, list[tuple[int, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                ranks = run_ranks(
                    on_rank, options.ranks, way, options.layers, folder, init=False, timeout_s=600
                )
                found[way].append((max(b for b, _ in ranks), max(s for _, s in ranks)))
    expected = size / options.ranks + unit
    print(
        f"{size / 1e6:.0f} MB in {options.layers} units of {unit / 1e6:.1f} MB on {options.ranks} "
        f"ranks, {options.rounds} rounds, torch {torch.__version__}"
    )
    for way, runs in found.items():
        peak = statistics.median(b for b, _ in runs)
        print(
            f"{way:24} peak {peak / 1e6:7.0f} MB  {peak / size:5.2f} x model"
            f"  {peak / expected:5.2f} x (model/ranks + unit)"
            f"  {statistics.median(s for _, s in runs):6.1f} s"
        )


if __name__ == "__main__":
    main()
