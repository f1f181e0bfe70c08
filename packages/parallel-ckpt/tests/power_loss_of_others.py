"""The same power cut after every call of other ways to save: what may be left of their checkpoints.

`python packages/parallel-ckpt/tests/power_loss_of_others.py` records three saves of each and counts
over all states of the bound. `torch-checkpointing` is left out where it is not installed. The table
of docs/checkpoints.md was printed by this program.

A checkpoint is whole where every file holds what it held when its save had returned. A state is
counted as `damaged` where a folder that is not whole is taken for a checkpoint: for DCP a folder
with `.metadata`, for torch-checkpointing one with its final name, for LeRobot what `last` leads to.
It is counted as `lost` where the save of a checkpoint has returned and it is missing or not whole.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as to_safetensors

from parallel_testing.power_loss import (
    Bound,
    Call,
    Recorder,
    Tree,
    crash_states,
    merged,
    read_tree,
    recorded,
    replay,
)
from parallel_testing.ranks import run_ranks
from test_power_loss import build

STEPS = (1, 2, 3)
Held = Mapping[str, bytes | str]


def save_all(root: Path, way: str) -> list[Call]:
    """Each rank: three saves, and on the main rank a note after each."""
    with recorded(root, package="torch") as recorder:
        WAYS[way](root, recorder)
    return recorder.calls


def by_dcp(root: Path, recorder: Recorder) -> None:
    """`dcp.save` with its own writer, which flushes files (`sync_files` is its default)."""
    for step in STEPS:
        model, optimizer = build(float(step), shard=True)
        moments = {str(k): s["momentum_buffer"] for k, s in enumerate(optimizer.state.values())}
        state = {**model.state_dict(), **moments}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(root / f"{step:06d}"))
        _note(recorder, step)


def by_torch_checkpointing(root: Path, recorder: Recorder) -> None:
    """Its `CheckpointManager`, synchronous; files by ordinary writes, which can be recorded."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager = CheckpointManager(config)
    for step in STEPS:
        model, optimizer = build(float(step))
        payload = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        manager.save(str(root / f"{step:06d}"), payload)
        dist.barrier()
        _note(recorder, step)
    manager.close()


def by_lerobot(root: Path, recorder: Recorder) -> None:
    """The sequence of calls that LeRobot makes for a checkpoint, written down here; one process."""
    last = root / "last"
    for step in STEPS:
        model, optimizer = build(float(step))
        moments = {str(k): s["momentum_buffer"] for k, s in enumerate(optimizer.state.values())}
        weights, state = root / f"{step:06d}/pretrained_model", root / f"{step:06d}/training_state"
        weights.mkdir(parents=True)
        (weights / "config.json").write_text(json.dumps({"step": step}))
        (weights / "model.safetensors").write_bytes(to_safetensors(model.state_dict()))
        (weights / "train_config.json").write_text(json.dumps({"steps": step}))
        state.mkdir()
        (state / "training_step.json").write_text(json.dumps({"step": step}))
        (state / "rng_state.safetensors").write_bytes(
            to_safetensors({"torch": torch.get_rng_state()})
        )
        (state / "optimizer_state.safetensors").write_bytes(to_safetensors(moments))
        (state / "optimizer_param_groups.json").write_text(json.dumps([{"lr": 0.1}]))
        if last.is_symlink():
            last.unlink()
        last.symlink_to(f"{step:06d}")
        _note(recorder, step)


def _note(recorder: Recorder, step: int) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        recorder.mark(str(step))


WAYS: dict[str, Callable[[Path, Recorder], None]] = {
    "dcp.save": by_dcp,
    "torch-checkpointing": by_torch_checkpointing,
    "LeRobot's sequence": by_lerobot,
}


def of_step(tree: Tree, step: int) -> Held:
    """The files of a checkpoint."""
    prefix = f"{step:06d}/"
    return {p: c for p, c in tree.items() if p.startswith(prefix) and c is not None}


def is_taken(way: str, tree: Tree, step: int) -> bool:
    """Whether a reader takes this folder for a checkpoint."""
    if way == "dcp.save":
        return f"{step:06d}/.metadata" in tree
    if way == "torch-checkpointing":
        return f"{step:06d}" in tree
    return tree.get("last") == f"{step:06d}"


def count(way: str, calls: list[Call]) -> str:
    """One line of the table."""
    whole: dict[int, Held] = {}
    told: list[tuple[int, ...]] = [()]
    for index, call in enumerate(calls):
        if call.kind == "mark":
            step = int(call.target)
            whole[step] = of_step(replay(calls[:index]).live(), step)
        told.append(tuple(whole))
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    trees: set[bytes] = set()
    damaged, lost = set(), set()
    for state in crash_states(calls, Bound()):
        promised = told[state.after]
        if (promised, state.digest) in seen:
            continue
        seen.add((promised, state.digest))
        trees.add(state.digest)
        held = {step: of_step(state.tree, step) == whole[step] for step in STEPS}
        if any(is_taken(way, state.tree, step) and not held[step] for step in STEPS):
            damaged.add(state.digest)
        if not all(held[step] for step in promised):
            lost.add(state.digest)
    flushes = sum(call.kind == "fsync" for call in calls)
    return f"| {way} | {len(calls)} | {flushes} | {len(trees)} | {len(damaged)} | {len(lost)} |"


def main() -> None:
    """Print the table."""
    print("| | calls | flushes | distinct states | damaged | lost |\n|---|---|---|---|---|---|")
    for way in WAYS:
        if way == "torch-checkpointing" and not importlib.util.find_spec("torch_checkpointing"):
            print(f"{way} is not installed: left out")
            continue
        ranks = 1 if way.startswith("LeRobot") else 2
        with tempfile.TemporaryDirectory() as name:
            root = Path(name).resolve() / "root"
            root.mkdir()
            calls = merged(run_ranks(save_all, ranks, root, way, init=ranks > 1))
            assert replay(calls).live() == read_tree(root), f"{way}: a call was not recorded"
        print(count(way, calls), flush=True)


if __name__ == "__main__":
    main()
