"""Is loading the bottleneck? Updates that wait for data beside updates on a batch that is there.

    python benchmarks/loading.py [--root DATASET] [--updates 40] [--rounds 5] [FLAGS of `train`]

Per round and in turn, in one process: updates through the loader, the same updates on one batch
that is repeated, and the loader alone. Printed are medians per update, the ratio of the first two,
and how many times faster the loader is than the training that it feeds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable

import torch

from parallel_config import Topology
from parallel_engine import Engine
from parallel_train.cli.parsing import parse
from parallel_train.task import Task, build_task


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args()
    root = ["--dataset.root", options.root] if options.root else []
    config = parse(["train", *root, *flags]).command.run
    engine = Engine(parallelism=config.parallelism, accelerator=config.accelerator)
    task = build_task(config, Topology(), 0, samples_seen=0, device=engine.device)
    prepared = engine.prepare(task.model, task.build_optimizer, task.build_scheduler, task.loader)
    batches = iter(prepared[3])
    cached = next(batches)
    ways = {
        "with loader": lambda: _updates(engine, task, prepared, batches, options.updates),
        "batch repeated": lambda: _updates(
            engine, task, prepared, itertools.repeat(cached), options.updates
        ),
        "loader alone": lambda: _consume(batches, options.updates),
    }
    for way in ways.values():
        way()  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, way) in itertools.product(range(options.rounds), ways.items()):
        seconds[name].append(way() / options.updates)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        rate = config.batch_size / value
        print(f"{name:<15} {value * 1e3:8.2f} ms per update, {rate:8.0f} samples/s")
    waiting = medians["with loader"] / medians["batch repeated"] - 1
    print(f"an update with the loader takes {1 + waiting:.2f}x of one on a batch that is there")
    print(f"the loader alone is {medians['with loader'] / medians['loader alone']:.1f}x as fast")


def _updates(engine: Engine, task: Task, prepared: tuple, batches: Iterable, count: int) -> float:
    model, optimizer, scheduler, _ = prepared
    begin = time.perf_counter()
    for batch in itertools.islice(batches, count):
        engine.step(model, optimizer, scheduler, [batch], task.loss_fn, clip_norm=1.0)
    return time.perf_counter() - begin


def _consume(batches: Iterable, count: int) -> float:
    begin = time.perf_counter()
    for batch in itertools.islice(batches, count):
        assert isinstance(next(iter(batch.values())), torch.Tensor)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
