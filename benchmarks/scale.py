"""Measure how saving and loading grow with the number of tensors.

    python benchmarks/scale.py [--tensors 2500 10000 50000] [--chunks 10000 200000 1000000]
                               [--rounds 3] [--folder DIR]

All tensors are small, so that what is measured is the cost of a tensor and not of its bytes. A
quarter of them are weights and the others are AdamW's state. Everything runs in one process.

The program prints processor time, because the cost of many tensors is work and not waiting. `per
tensor` should stay the same from one line of a kind to the next. The ratio is over torch's own way
at the same number of tensors: `dcp.save` for a save, `dcp.load` for a restore.

`--chunks` measures the description alone: `.metadata` and our index of tensors that 64 ranks hold
shards of, written and read without any shard. Its ratio is over `pickle.load` of the same
`.metadata`, which trusts the file.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from parallel_ckpt import CheckpointSaver, read_start, restore
from parallel_ckpt.formats.dcp import read_dcp
from parallel_ckpt.formats.dcp_index import Row, read_index
from parallel_ckpt.inspect import inspect
from parallel_ckpt.save.dcp import Part, Written, finish
from parallel_ckpt.verify import verify
from parallel_config import CheckpointConfig, CheckpointFormat, Topology

WIDTH = 64
"""Elements of a tensor."""
RANKS = 64
"""That hold a shard of each tensor, where only its description is measured."""
SINGLE = Topology()
YARDSTICKS = {"save": "dcp.save", "restore": "dcp.load"}


class Flat(nn.Module):
    """Many small parameters, some of each shape."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        shapes = [(WIDTH,), (WIDTH // 4, 4), (2, WIDTH // 2)]
        self.layers = nn.ParameterList(
            torch.randn(shapes[i % len(shapes)]) for i in range(num_parameters)
        )


def build(num_tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has taken a step; together they have `num_tensors`."""
    model = Flat(num_tensors // 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors by name, as a checkpoint names them."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"state.{name}.{k}": v for k, v in optimizer.state[parameter].items()}
    return found


def processor_seconds(act: Callable[[], object]) -> float:
    """Processor time of all threads of this process."""
    gc.collect()
    begin = time.process_time()
    act()
    return time.process_time() - begin


def measure_tensors(num_tensors: int, rounds: int, folder: Path) -> dict[str, float]:
    """Median processor seconds of each way."""
    model, optimizer = build(num_tensors)
    state = flat_state(model, optimizer)
    assert len(state) == num_tensors
    empty, fresh = Flat(num_tensors // 4), torch.optim.AdamW
    config = CheckpointConfig(keep_last=1)
    seconds: dict[str, list[float]] = {}
    with CheckpointSaver(
        folder / "run", topology=SINGLE, config=config, checkpoint_format=CheckpointFormat.DCP
    ) as saver:
        for step in range(1, rounds + 2):

            def save(step: int = step) -> None:
                saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)

            def load() -> None:
                start = read_start(folder / "run", topology=SINGLE)
                restore(start.path, empty, fresh(empty.parameters()))

            ways: dict[str, Callable[[], object]] = {
                "dcp.save": lambda: dcp.save(state, checkpoint_id=folder / "torch"),
                "save": save,
                "dcp.load": lambda: dcp.load(
                    {name: torch.empty_like(value) for name, value in state.items()},
                    checkpoint_id=folder / "torch",
                ),
                "restore": load,
                "verify": lambda: verify(folder / "run"),
                "inspect": lambda: inspect(folder / "run" / "checkpoints" / "last"),
            }
            for name, act in ways.items():
                seconds.setdefault(name, []).append(processor_seconds(act))
    restored = dict(empty.named_parameters())
    assert all(torch.equal(value, restored[name]) for name, value in model.named_parameters())
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def report_tensors(counts: Sequence[int], rounds: int, folder: Path) -> None:
    """Print a line for each way and number of tensors."""
    former: dict[str, float] = {}
    for count in counts:
        seconds = measure_tensors(count, rounds, folder / str(count))
        for name, cpu in seconds.items():
            per_tensor = cpu / count
            line = (
                f"{name:10} {count:9,} tensors {cpu:8.3f} s {per_tensor * 1e6:9.1f} us per tensor"
            )
            if name in YARDSTICKS:
                line += f"  ratio {cpu / seconds[YARDSTICKS[name]]:5.3f}"
            if name in former:
                line += f"  growth {per_tensor / former[name]:4.2f}"
            former[name] = per_tensor
            print(line, flush=True)


def describe(num_chunks: int, folder: Path) -> None:
    """Write what a save of `num_chunks` shards by `RANKS` ranks says of them."""
    shape, sizes = (RANKS * WIDTH, 4), (WIDTH, 4)
    num_bytes = 4 * WIDTH * 4
    parts = []
    for rank in range(RANKS):
        boxes = [
            Written(
                Row(
                    f"layers.{i}.weight", "float32", shape, (rank * WIDTH, 0), sizes,
                    f"__{rank}_0.distcp", i * 2 * num_bytes + 512, num_bytes, i,
                ),
                i * 2 * num_bytes,
                2 * num_bytes,
            )
            for i in range(num_chunks // RANKS)
        ]  # fmt: skip
        parts.append(Part(boxes, {}))
    finish(folder, parts)


def report_chunks(counts: Sequence[int], rounds: int, folder: Path) -> None:
    """Print what reading the description costs."""
    for count in counts:
        where = folder / f"chunks-{count}"
        where.mkdir(parents=True)
        print(f"{'write':10} {count:9,} chunks  ", end="")
        print(f"{processor_seconds(lambda n=count, f=where: describe(n, f)):8.3f} s")

        def unpickle(where: Path = where) -> None:
            with (where / ".metadata").open("rb") as file:
                pickle.load(file)

        ways: dict[str, Callable[[], object]] = {
            "pickle": unpickle,
            "index": lambda where=where: read_index(where),
            "foreign": lambda where=where: read_dcp(where),
        }
        seconds: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, act in ways.items():
                seconds.setdefault(name, []).append(processor_seconds(act))
        for name, found in seconds.items():
            cpu = statistics.median(found)
            ratio = cpu / statistics.median(seconds["pickle"])
            print(f"{name:10} {count:9,} chunks  {cpu:8.3f} s  ratio {ratio:5.2f}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensors", type=int, nargs="*", default=[2_500, 10_000, 50_000])
    parser.add_argument("--chunks", type=int, nargs="*", default=[10_000, 200_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report_tensors(options.tensors, options.rounds, Path(folder))
        report_chunks(options.chunks, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
