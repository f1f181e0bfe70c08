"""Compare `ptrain convert` with other programs that merge DCP shards, in one run.

    python benchmarks/convert.py [--gigabytes 2] [--rounds 5] [--folder DIR]

FSDP2 shards a model in fp32 over 4 ranks, and the model is saved as accelerate saves it. Each way
of merging then runs in its own process, in turn, `rounds` times. The program prints medians and the
ratios of the times. The wall time runs from the start to the end of the call, without the start of
the interpreter and the imports. The memory is the peak above the bare interpreter, imports
included. `cp+fsync` copies the same files to the same disk. All sources are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from parallel_testing.ranks import run_ranks

WORLD_SIZE = 4
WIDTH = 2048

RUNNER = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
def peak():
    # Not ru_maxrss: in a child process it begins with the value of the parent.
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
source, target, bare = sys.argv[1], sys.argv[2], peak()
{setup}
os.sync()
begin = time.monotonic()
{call}
print(json.dumps([time.monotonic() - begin, peak() - bare]))
"""
FLUSH = """
for root, _, names in os.walk(os.path.dirname(target)):
    for name in names:
        descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
"""
WAYS = {
    "cp+fsync": ("import shutil", "shutil.copytree(source, target)" + FLUSH),
    "convert": ("from parallel_ckpt.convert import convert", "convert(source, target)"),
    "convert bf16": (
        "from parallel_ckpt.convert import convert",
        "convert(source, target, dtype='bf16')",
    ),
    "accelerate merge_fsdp_weights": (
        "from accelerate.utils import merge_fsdp_weights",
        "merge_fsdp_weights(source, target)" + FLUSH,
    ),
    "torch dcp_to_torch_save": (
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save",
        "os.makedirs(target); dcp_to_torch_save(source, target + '/model.pt')" + FLUSH,
    ),
}


def save(folder: str, num_layers: int) -> None:
    """Collective: every rank. Save a stack of square layers, sharded over all ranks."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def run(way: str, source: Path) -> tuple[float, float]:
    """Seconds and bytes of one conversion in its own process."""
    setup, call = WAYS[way]
    with tempfile.TemporaryDirectory(dir=source.parent) as parent:
        program = RUNNER.format(setup=setup, call=call)
        command = [sys.executable, "-c", program, str(source), f"{parent}/out"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, num_bytes = json.loads(done.stdout.splitlines()[-1])
    return seconds, num_bytes


def main() -> None:
    """Save, convert in every way and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    num_layers = max(1, round(options.gigabytes * 1e9 / (WIDTH * (WIDTH + 1) * 4)))
    root = Path(tempfile.mkdtemp(prefix="convert-", dir=options.folder))
    try:
        source = root / "pytorch_model_fsdp_0"
        run_ranks(save, WORLD_SIZE, str(source), num_layers, timeout_s=600)
        size = sum(path.stat().st_size for path in source.iterdir())
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                found[way].append(run(way, source))
    finally:
        shutil.rmtree(root)
    print(
        f"{size / 1e9:.2f} GB in {num_layers} layers from {WORLD_SIZE} ranks, {options.rounds} "
        f"rounds, torch {torch.__version__}, {os.cpu_count()} cores"
    )
    report(found)


def report(found: dict[str, list[tuple[float, float]]]) -> None:
    """Print a line for each way: median wall time, its ratios, and median memory."""
    wall = {way: statistics.median(s for s, _ in runs) for way, runs in found.items()}
    for way, runs in found.items():
        spread = max(s for s, _ in runs) - min(s for s, _ in runs)
        memory = statistics.median(b for _, b in runs)
        print(
            f"{way:30} {wall[way]:7.2f} s (spread {spread:5.2f})"
            f"  {wall[way] / wall['cp+fsync']:5.2f} x cp+fsync"
            f"  {wall[way] / wall['accelerate merge_fsdp_weights']:5.2f} x accelerate"
            f"  {memory / 1e6:8.1f} MB"
        )


if __name__ == "__main__":
    main()
