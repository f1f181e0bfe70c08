"""Is loading the bottleneck? Compare updates that wait for data with updates on one repeated batch.

    python benchmarks/loading.py [--root DATASET] [--updates 40] [--rounds 5] [FLAGS of `train`]
    python benchmarks/loading.py --video [--root DATASET] [--workers 0 1 2] [--rounds 5]

One process runs three ways in turn, in every round: updates through the loader, the same updates on
one repeated batch, and the loader alone. The program prints medians per update, the ratio of the
first two, and how many times faster the loader is than the training that it feeds.

With --video it prints the pictures per second of one camera: through the loader, and with PyAV
alone, which decodes the same frames of the same file to RGB. It reads them in the order of the file
and in the shuffled order of training. Without --root, it writes a small dataset into a temporary
folder.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from parallel_config import Topology
from parallel_engine import Engine
from parallel_train.cli.parsing import parse
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.loader import build_loader
from parallel_train.data.order import GlobalBatchSampler
from parallel_train.data.writing import Episode, write_dataset
from parallel_train.run.task import Task, build_task

BATCH = 8
NUM_BATCHES = 24
CAMERA = "observation.images.top"


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--codec", default="libx264")
    parser.add_argument("--key_frame_every", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=2, default=[240, 320])
    options, flags = parser.parse_known_args()
    if options.video:
        with _dataset(options) as root:
            compare_video(root, options.workers, options.rounds)
        return
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
    medians = {n: s / options.updates for n, s in _medians(ways, options.rounds).items()}
    for name, value in medians.items():
        rate = config.batch_size / value
        print(f"{name:<15} {value * 1e3:8.2f} ms per update, {rate:8.0f} samples/s")
    waiting = medians["with loader"] / medians["batch repeated"] - 1
    print(f"an update with the loader takes {1 + waiting:.2f}x one on a repeated batch")
    faster = medians["with loader"] / medians["loader alone"]
    print(f"the loader alone is {faster:.1f}x as fast as training with it")


def compare_video(root: Path, workers: list[int], rounds: int) -> None:
    """Print pictures per second and their ratio to PyAV."""
    camera = next(iter(LeRobotDataset(root).spec.cameras()))
    dataset = LeRobotDataset(root, cameras=[camera])
    frames = BATCH * NUM_BATCHES
    orders: dict[str, Any] = {
        "in order": InOrder(len(dataset)),
        "shuffled": GlobalBatchSampler(len(dataset), BATCH),
    }
    print(f"{len(dataset)} frames of {camera}, {list(dataset.spec.cameras()[camera])}")
    for order, sampler in orders.items():
        plain = PlainVideo(root, dataset, camera)
        indices = itertools.chain.from_iterable(sampler)
        ways: dict[str, Callable[[], float]] = {
            "PyAV alone": lambda plain=plain, indices=indices: plain.read(  # type: ignore[misc]
                itertools.islice(indices, frames)
            )
        }
        for number in workers:
            loader = iter(build_loader(dataset, sampler, num_workers=number))
            ways[f"{number} workers"] = lambda loader=loader: _consume(  # type: ignore[misc]
                loader, NUM_BATCHES
            )
        medians = _medians(ways, rounds)
        for name, seconds in medians.items():
            ratio = medians["PyAV alone"] / seconds
            print(f"{order:<9} {name:<11} {frames / seconds:8.0f} pictures/s  {ratio:5.2f}x")


class InOrder(Sampler[list[int]]):
    """Endless batches in the order of the dataset."""

    seed = start_samples = dp_rank = 0

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[list[int]]:
        numbers = itertools.cycle(range(self.num_samples))
        while True:
            yield list(itertools.islice(numbers, BATCH))


class PlainVideo:
    """Plain use of PyAV: keep the file open, and seek unless the next frame is wanted."""

    def __init__(self, root: Path, dataset: LeRobotDataset, camera: str) -> None:
        import av

        metadata = dataset.metadata
        span = metadata.episodes[0].videos[camera]
        if len({episode.videos[camera].file for episode in metadata.episodes}) > 1:
            raise SystemExit("--root must name a dataset with one video file per camera")
        self.container = av.open(str(root / span.file))
        self.stream = self.container.streams.video[0]
        self.stream.codec_context.thread_count = 1  # a loader process decodes with one thread too
        self.fps, self.decoder, self.next = metadata.spec.fps, None, -1

    def read(self, indices: Iterable[int]) -> float:
        """Decode the frames; return the seconds."""
        begin = time.perf_counter()
        for index in indices:
            if index != self.next:
                start = int(index / self.fps / self.stream.time_base)
                self.container.seek(start, stream=self.stream)
                self.decoder = self.container.decode(self.stream)
            for frame in self.decoder:
                if frame.time > (index - 0.5) / self.fps:
                    frame.to_ndarray(format="rgb24")
                    break
            self.next = index + 1
        return time.perf_counter() - begin


@contextlib.contextmanager
def _dataset(options: argparse.Namespace) -> Iterator[Path]:
    if options.root:
        yield Path(options.root)
        return
    rng = np.random.default_rng(0)
    height, width = options.size
    scene = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    scene = scene.repeat(8, axis=0).repeat(8, axis=1)
    episodes = []
    for shift in range(4):
        moved = [np.roll(scene, (2 * frame + 40 * shift, frame), (0, 1)) for frame in range(150)]
        state = rng.normal(size=(150, 4)).astype(np.float32)
        episodes.append(Episode(state, state, "look", {CAMERA: np.stack(moved)}))
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(
            Path(folder),
            episodes,
            fps=30,
            codec=options.codec,
            key_frame_every=options.key_frame_every,
        )
        yield Path(folder)


def _medians(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each way. They take turns, and the first turn does not count."""
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, way) in itertools.product(range(rounds), ways.items()):
        seconds[name].append(way())
    return {name: statistics.median(values) for name, values in seconds.items()}


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
