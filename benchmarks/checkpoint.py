"""Compare saving and loading with `dcp.save`, `dcp.load`, `safetensors.save_file` and plain files.

    python benchmarks/checkpoint.py [--gigabytes 1] [--rounds 5] [--width 1024] [--folder DIR]

FSDP2 shards a model in fp32 with AdamW's two moments over 2 gloo ranks. The weights are a third of
the bytes. All ways run in the same processes, one after another in every round. The order turns by
one from round to round. The disk is idle before each way. The clock runs from a barrier to the
return on the slowest rank. The program prints medians, their spread, and ratios of medians.

It also prints the processor time of all ranks together. This time shows the cost of the work even
if the disk is slow or the machine is busy.

`dcp.save` runs with 1, 2 and 4 writing threads and with cached plans. Our saves are compared with
the fastest of these. Every way of saving flushes to disk, except `torch-checkpointing`, which does
not flush. It is measured where it is installed: synchronous, the shards of each rank in one file.

A load begins with an optimizer without state, as after a start, so its time includes allocating the
moments. In a `warm` load the files are in the page cache, and in a `cold` load they are not.

The first round warms up and does not count. A separate last round samples memory: the anonymous
memory of the rank that takes most, at its peak, above the memory that the rank held before. The
memory of a load includes the moments that it allocates. The memory of an `async` save includes the
buffers that it keeps for the next save.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import itertools
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_ckpt import CheckpointSaver, read_start, restore, save_weights
from parallel_config import CheckpointConfig, CheckpointFormat, Topology
from parallel_testing.ranks import run_ranks

WORLD_SIZE = 2
TOPOLOGY = Topology(dp_shard=WORLD_SIZE)
DCP_THREADS = (1, 2, 4)
LIBC = ctypes.CDLL(None)
FORMATS = {"safetensors": CheckpointFormat.SAFETENSORS, "dcp": CheckpointFormat.DCP}


class Block(nn.Module):
    """The two large layers and the small layers of a transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


@dataclass
class Bench:
    """One rank's side of the comparison."""

    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Wall and processor seconds of each round, by way."""
    memory: dict[str, float] = field(default_factory=dict)
    sampling: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this rank cleans up."""
        return dist.get_rank() == 0

    def path(self, name: str) -> Path:
        """The folder of a way; it is the same on all ranks."""
        return self.folder / name.replace(" ", "-").replace(",", "")

    def timed(self, name: str, act: Callable[[], Any]) -> None:
        """Collective: every rank. Time `act`, and keep the seconds of the slowest rank."""
        if self.is_main:
            os.sync()
        dist.barrier()
        if self.sampling:
            LIBC.malloc_trim(0)
        with sampled(self.sampling) as peak:
            begin, cpu = time.perf_counter(), time.process_time()
            act()
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        worst = torch.tensor([seconds, *peak], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        together = torch.tensor(cpu, dtype=torch.float64)
        dist.all_reduce(together)
        self.memory[name] = float(worst[1])
        if not self.sampling:
            self.seconds.setdefault(name, []).append((float(worst[0]), float(together)))

    def remove(self, path: Path) -> None:
        """Collective: every rank. Delete the files of a way, so that later writes are new."""
        dist.barrier()
        if self.is_main:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of the run, flat, as a checkpoint names them."""
        found = dict(self.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            entries = self.optimizer.state[parameter].items()
            found |= {f"state.{name}.{key}": value for key, value in entries}
        return {name: tensor.detach() for name, tensor in found.items()}


def build(folder: Path, width: int, num_blocks: int) -> Bench:
    """Collective: every rank. The sharded model and an optimizer that has taken a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    gc.freeze()  # else each collection copies the pages that this process shares with its parent
    return Bench(folder, model, optimizer)


# Saving


def write_plainly(bench: Bench, name: str) -> None:
    """Write the bytes of this rank into one file. This shows the speed of the disk."""
    with (bench.path(name) / str(dist.get_rank())).open("wb", buffering=0) as file:
        for tensor in bench.state().values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            view = memoryview(local.reshape(-1).view(torch.uint8).numpy())
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def save_ways(bench: Bench, whole: dict[str, torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Collective when called: each measures one way and deletes its files."""

    def plain() -> None:
        name = "write+fsync"
        bench.path(name).mkdir(parents=True, exist_ok=True)
        bench.timed(name, lambda: write_plainly(bench, name))
        bench.remove(bench.path(name))

    def torchs(threads: int) -> None:
        name = f"dcp.save {threads} thread{'s' * (threads > 1)}"
        writer = dcp.FileSystemWriter(bench.path(name), thread_count=threads)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        bench.timed(name, lambda: dcp.save(bench.state(), storage_writer=writer, planner=planner))
        bench.remove(bench.path(name))

    def files() -> None:
        path = bench.path("save_file")

        def act() -> None:
            if bench.is_main:
                path.mkdir()
                save_file(whole, path / "model.safetensors")
                with (path / "model.safetensors").open("rb") as file:
                    os.fsync(file.fileno())

        bench.timed("safetensors.save_file", act)
        bench.remove(path)
        bench.timed("save_weights", lambda: save_weights(bench.model, path))
        bench.remove(path)

    def metas() -> None:
        name = "torch-checkpointing, no flush"
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Its direct writes (0.1.1) ended in "Invalid argument" on the disk that this was tried on.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        save = SyncCheckpointSaverConfig()
        manager = CheckpointManager(CheckpointManager.Config(save=save, storage_config=storage))
        shards = {
            key: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for key, tensor in bench.state().items()
        }
        bench.timed(name, lambda: manager.save(str(bench.path(name)), {"state": shards}))
        manager.close()
        bench.remove(bench.path(name))

    yield plain
    for threads in DCP_THREADS:
        yield lambda threads=threads: torchs(threads)
    if has_torch_checkpointing():
        yield metas
    yield files


def has_torch_checkpointing() -> bool:
    """Whether Meta's package is installed; it is not a dependency of this workspace."""
    return importlib.util.find_spec("torch_checkpointing") is not None


def open_savers(folder: Path) -> dict[str, CheckpointSaver]:
    """Collective: every rank. One saver for each kind and format, by name."""
    return {
        f"{kind}{form}": CheckpointSaver(
            folder / f"{kind}{form}",
            topology=TOPOLOGY,
            config=CheckpointConfig(async_save=kind == "async "),
            checkpoint_format=of,
        )
        for kind in ("", "async ")
        for form, of in FORMATS.items()
    }


def saver_ways(bench: Bench, savers: dict[str, CheckpointSaver]) -> Iterator[Callable[[], None]]:
    """Collective when called: each open saver saves, and its checkpoint stays for the loads."""

    def once(name: str) -> None:
        saver, step = savers[name], next(STEPS)
        former = list((bench.folder / name / "checkpoints").glob("0*"))

        def act() -> None:
            saver.save(step=step, samples_seen=0, model=bench.model, optimizer=bench.optimizer)

        bench.timed(f"save {name}" + (", pause" if name.startswith("async") else ""), act)
        saver.wait()
        for path in former:  # outside of the time, as with the other ways
            bench.remove(path)

    for name in savers:
        yield lambda name=name: once(name)


STEPS = itertools.count(1)


# Loading


def read_plainly(path: Path) -> None:
    """Read a share of the bytes of a checkpoint into memory that is allocated already."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    buffer = bytearray(8 << 20)
    for file in files[dist.get_rank() :: WORLD_SIZE]:
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass


def load_by_torch(bench: Bench, path: Path) -> None:
    """Use DCP directly, on tensors by name."""
    state = dict(bench.model.named_parameters())
    for name, parameter in bench.model.named_parameters():
        bench.optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.empty_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
        }
        entries = bench.optimizer.state[parameter].items()
        state |= {f"state.{name}.{key}": value for key, value in entries}
    targets = {name: tensor.detach() for name, tensor in state.items()}
    dcp.load(targets, storage_reader=dcp.FileSystemReader(path))


def load_by_us(bench: Bench, path: Path, verify: Any) -> None:
    """Both phases of a resume."""
    start = read_start(path, topology=TOPOLOGY, verify=verify)
    restore(start.path, bench.model, bench.optimizer)


def load_ways(bench: Bench, torchs: Path, ours: dict[str, Path]) -> Iterator[Callable[[], None]]:
    """Collective when called: each fills model and optimizer, and checks the values."""

    def once(name: str, path: Path, cold: bool, act: Callable[[], None]) -> None:
        if name != "read":
            wipe(bench)
        if cold and bench.is_main:
            forget(path)
        bench.timed(f"{name}, {'cold' if cold else 'warm'}", act)
        if name != "read":
            check(bench)

    for cold in (False, True):
        yield lambda cold=cold: once("read", torchs, cold, lambda: read_plainly(torchs))
        yield lambda cold=cold: once("dcp.load", torchs, cold, lambda: load_by_torch(bench, torchs))
        for form, path in ours.items():
            for verify in ("fast", "full"):
                yield lambda cold=cold, form=form, path=path, verify=verify: once(
                    f"restore {form} {verify}", path, cold, lambda: load_by_us(bench, path, verify)
                )


def wipe(bench: Bench) -> None:
    """Remove the values that the next load must bring."""
    with torch.no_grad():
        for parameter in bench.model.parameters():
            parameter.zero_()
    bench.optimizer.state.clear()
    gc.collect()


def check(bench: Bench) -> None:
    """Check that the loaded values are the saved values."""
    for name, tensor in bench.state().items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found = xor(local) if local.numel() else 0
        assert found == CHECKS.setdefault(name, found), (name, local.reshape(-1)[:3])


CHECKS: dict[str, int] = {}
"""Checksums by name; filled before the first save."""


def xor(tensor: torch.Tensor) -> int:
    """A checksum in one pass over a tensor of four-byte items."""
    return int(tensor.reshape(-1).view(torch.int32).sum(dtype=torch.int64))


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def anonymous_bytes() -> int:
    """Memory of this process that does not belong to a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def give_back_what_is_freed() -> None:
    """From now on, return freed blocks to the system. Else they hide what the next way allocates.

    This also makes allocating slower.
    """
    LIBC.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD


@contextmanager
def sampled(wanted: bool) -> Iterator[list[float]]:
    """A list that holds, after the block, the growth of anonymous memory at its peak, in bytes."""
    peak = [0.0]
    if not wanted:
        yield peak
        return
    begin, samples, done = anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            samples.append(anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak[0] = max(samples) - begin


def work(folder: Path, width: int, num_blocks: int, rounds: int) -> Any:
    """Collective: every rank. Run all rounds; return seconds and bytes by way."""
    bench = build(folder, width, num_blocks)
    check(bench)
    whole = {name: parameter.full_tensor() for name, parameter in bench.model.named_parameters()}
    torchs = folder / "by torch"
    dcp.save(bench.state(), storage_writer=dcp.FileSystemWriter(torchs, thread_count=2))
    savers = open_savers(folder)
    ways = [
        *save_ways(bench, whole),
        *saver_ways(bench, savers),
        *load_ways(bench, torchs, {form: folder / form for form in FORMATS}),
    ]
    num_saves = len(ways) - 10
    run_rounds(bench, ways[:num_saves], ways[num_saves:], rounds)
    bench.sampling = True
    for saver in savers.values():
        saver.close()
    savers |= open_savers(folder)
    give_back_what_is_freed()
    for act in ways:
        act()
    for saver in savers.values():
        saver.close()
    return bench.seconds, bench.memory


def run_rounds(
    bench: Bench, saves: list[Callable[[], None]], loads: list[Callable[[], None]], rounds: int
) -> None:
    """Collective: every rank. Run one round to warm up, then the rounds that count."""
    for number in range(-1, rounds):
        if number == 0:
            bench.seconds.clear()
        for ways in (saves, loads):
            turn = number % len(ways)
            for act in ways[turn:] + ways[:turn]:
                act()


def main() -> None:
    """Run the ranks and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="size of weights and moments together"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--width", type=int, default=1024, help="a smaller width means more and smaller tensors"
    )
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    block = sum(p.numel() for p in Block(options.width).parameters())
    num_blocks = max(1, round(options.gigabytes * 1e9 / (block * 12)))
    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        arguments = (root, options.width, num_blocks, options.rounds)
        seconds, memory = run_ranks(work, WORLD_SIZE, *arguments, timeout_s=3600)[0]
    finally:
        shutil.rmtree(root)
    print(
        f"{num_blocks * block * 12 / 1e9:.2f} GB in {num_blocks * 6 * 4} tensors on {WORLD_SIZE} "
        f"ranks, {options.rounds} rounds, torch {torch.__version__}, {os.cpu_count()} cores"
    )
    if not has_torch_checkpointing():
        print(
            "torch-checkpointing is not installed and was left out: pip install torch-checkpointing"
        )
    report(seconds, memory)


def report(seconds: dict[str, list[tuple[float, float]]], memory: dict[str, float]) -> None:
    """Print a line for each way: medians of wall and processor time, spread, ratios, memory."""
    wall = {name: statistics.median(w for w, _ in found) for name, found in seconds.items()}
    cpu = {name: statistics.median(c for _, c in found) for name, found in seconds.items()}
    best = min((name for name in wall if name.startswith("dcp.save")), key=wall.__getitem__)
    for name, found in seconds.items():
        other = yardstick_of(name, best)
        low, high = min(w for w, _ in found), max(w for w, _ in found)
        print(
            f"{name:32} {wall[name]:7.3f} s ({low:.3f} to {high:.3f})"
            f" {wall[name] / wall[other]:5.2f}"
            f"   cpu {cpu[name]:7.3f} s {cpu[name] / cpu[other]:5.2f}"
            f"   {memory[name] / 1e6:7.1f} MB   over {other}"
        )


def yardstick_of(name: str, best_save: str) -> str:
    """The name of the way that `name` is compared with."""
    if name.endswith(", pause"):
        return name.replace("async ", "").removesuffix(", pause")
    if name.startswith("restore"):
        return f"dcp.load, {name.rsplit(' ', 1)[1]}"
    if name == "save_weights":
        return "safetensors.save_file"
    if name.startswith("save "):
        return best_save
    if name.startswith("dcp.load"):
        return name.replace("dcp.load", "read")
    return name if name.startswith("read") else "write+fsync"


if __name__ == "__main__":
    main()
