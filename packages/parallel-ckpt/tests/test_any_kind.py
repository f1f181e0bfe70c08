"""A checkpoint of any kind of run resumes any other: bit for bit, and the curve goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel_ckpt import CheckpointSaver, load_weights, read_start, restore, save_weights
from parallel_config import CheckpointConfig, CheckpointFormat, Topology
from parallel_testing.ranks import run_ranks

KINDS = {
    "single": Topology(),
    "ddp2": Topology(dp_replicate=2),
    "fsdp2": Topology(dp_shard=2),
    "fsdp3": Topology(dp_shard=3),
    "fsdp4": Topology(dp_shard=4),
    "hsdp2x2": Topology(dp_replicate=2, dp_shard=2),
}
FORMATS = dict(zip(KINDS, [*CheckpointFormat, *CheckpointFormat], strict=True))
GLOBAL_BATCH, BEFORE, AFTER = 12, 3, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 5), nn.Linear(5, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))


class Odd(nn.Module):
    """Tied, frozen, unused, odd-shaped, 0-dim and buffered tensors in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 3)
        self.bias = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(tokens)) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.bias


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR

    def step(self, number: int) -> float:
        """One update on this rank's slice of a global batch; the loss over all ranks."""
        tokens = torch.randint(
            0, 7, (GLOBAL_BATCH, 4), generator=torch.Generator().manual_seed(number)
        )
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = tokens.chunk(world)[rank]
        logits = self.model(mine[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        return float(total / world)


def build(topology: Topology, seed: int = 0) -> Run:
    torch.manual_seed(seed)
    model: nn.Module = Odd()
    if topology.is_sharded:
        shape, names = (topology.dp_shard,), ("dp_shard",)
        if topology.dp_replicate > 1:
            shape = (topology.dp_replicate, topology.dp_shard)
            names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        ignored = {model.scale}
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
        assert isinstance(model.embed.weight, DTensor)
        assert model.embed.weight.to_local().shape[0] < 7
    elif topology.dp_replicate > 1:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    matrices = [p for p in trained.values() if p.ndim > 1]
    vectors = [p for p in trained.values() if p.ndim <= 1]
    groups = [
        {"params": []},
        {"params": matrices, "weight_decay": 0.1, "amsgrad": True},
        {"params": vectors, "weight_decay": 0.0, "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + 0.1 * k))
    return Run(model, optimizer, scheduler)


def full(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().clone()
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def everything(run: Run) -> dict[str, Any]:
    """Collective. All state, gathered without any code of the package."""
    found: dict[str, Any] = {}
    for name, tensor in [
        *run.model.named_parameters(remove_duplicate=False),
        *((n, b) for n, b in run.model.named_buffers() if not n.endswith("table")),
    ]:
        found[name.removeprefix("module.")] = full(tensor)
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            found[f"state/{name.removeprefix('module.')}/{key}"] = full(value)
    for i, group in enumerate(run.optimizer.param_groups):
        found |= {f"group{i}/{key}": value for key, value in group.items() if key != "params"}
    return found | {f"scheduler/{k}": v for k, v in run.scheduler.state_dict().items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def save_as(kind: str, root: Path) -> list[float]:
    run = build(KINDS[kind])
    for number in range(BEFORE):
        run.step(number)
    state = everything(run)
    config = CheckpointConfig(max_shard_size="300B", async_save=kind == "fsdp3")
    with CheckpointSaver(
        root / kind, topology=KINDS[kind], checkpoint_format=FORMATS[kind], config=config
    ) as saver:
        saver.save(
            step=BEFORE,
            samples_seen=BEFORE * GLOBAL_BATCH,
            model=run.model,
            optimizer=run.optimizer,
            scheduler=run.scheduler,
        )
        losses = [run.step(number) for number in range(BEFORE, BEFORE + AFTER)]
    save_weights(run.model, root / kind / "exported")
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(state, root / f"{kind}.pt")
    return losses


def resume_all_as(kind: str, root: Path) -> dict[str, list[float]]:
    curves = {}
    for saved, topology in KINDS.items():
        run = build(KINDS[kind], seed=99)
        start = read_start(root / saved, topology=KINDS[kind])
        assert start.manifest.topology == topology
        restored = restore(start.path, run.model, run.optimizer, run.scheduler)
        start.restore_rng()
        state = torch.load(root / f"{saved}.pt", weights_only=True)
        assert_same(everything(run), state)
        entries = [key for key in state if key.startswith("state/")]
        assert restored.num_optimizer_entries == len(entries)
        assert not any(key.startswith("state/unused") for key in entries)
        curves[saved] = [run.step(number) for number in range(BEFORE, BEFORE + AFTER)]
        exported = build(KINDS[kind], seed=98)
        load_weights(exported.model, root / saved / "exported")
    return curves


def start(work: Any, kind: str, root: Path) -> Any:
    return run_ranks(work, KINDS[kind].world_size, kind, root, init=kind != "single")[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("kinds")
    return root, {kind: start(save_as, kind, root) for kind in KINDS}


def test_every_rank_wrote_its_part_and_every_tensor_lies_there_once(saved: Any) -> None:
    root, _ = saved
    sizes = {}
    for kind in ("fsdp2", "hsdp2x2"):
        files = list((root / kind / "checkpoints/000003/training_state/optimizer").glob("*.distcp"))
        ranks = {file.name.split("_")[2] for file in files if file.stat().st_size}
        assert ranks == {str(rank) for rank in range(KINDS[kind].world_size)}
        sizes[kind] = sum(file.stat().st_size for file in files)
    assert sizes["hsdp2x2"] < 1.2 * sizes["fsdp2"]


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_every_kind(kind: str, saved: Any) -> None:
    root, reference = saved
    curves = start(resume_all_as, kind, root)
    assert curves[kind] == reference[kind]
    for origin, curve in curves.items():
        assert curve == pytest.approx(reference[origin], abs=1e-5), origin
