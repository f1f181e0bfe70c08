"""Resuming in two phases: what must be known before the model is built, then its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from parallel_ckpt._ranks import Ranks, all_ranks
from parallel_ckpt.errors import CheckpointNotFound, DamagedCheckpoint, StateMismatch
from parallel_ckpt.integrity import Verify
from parallel_ckpt.layout import DCP_METADATA, StepFolder
from parallel_ckpt.manifest import Manifest
from parallel_ckpt.optimizer_state import (
    Allocation,
    allocate,
    check_index,
    inner_optimizer,
    inner_scheduler,
    install,
)
from parallel_ckpt.plain import load_json
from parallel_ckpt.resolving import resolve_checkpoint, verify_on_all
from parallel_ckpt.rng import DerivedRng, RngState, derived_seed
from parallel_ckpt.shards import Shard, aliases, model_shards
from parallel_ckpt.sources import DcpSource, SafetensorsSource
from parallel_ckpt.stored import Source, fill_all, match
from parallel_config import Topology


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a resumed run begins: everything that does not need the model."""

    path: Path
    """The real step folder, whatever link led to it."""
    manifest: Manifest
    data_state: Any
    """As given to `save`."""
    train_config: str | None
    """Text of the run's config, None when none was saved."""
    rng: RngState | DerivedRng
    notes: tuple[str, ...]
    """What the log should say about this resume."""

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return self.manifest.step

    @property
    def samples_seen(self) -> int:
        """Samples consumed by those updates, over all ranks."""
        return self.manifest.samples_seen

    def restore_rng(self) -> None:
        """Put this rank's random streams in place: the last act before the first micro-batch.

        Building a model and starting a loader both draw from them.
        """
        self.rng.restore()


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `restore` put back."""

    num_tensors: int
    """Weights and buffers of the model."""
    num_optimizer_entries: int
    """Entries of the optimizer's state over all parameters."""


def read_start(path: str | Path, *, topology: Topology, verify: Verify = "full") -> Start:
    """Collective: every rank. Phase one of a resume: check every file, read all but the tensors.

    `topology` is that of the run that resumes; on another world size than the saved one the random
    streams are derived anew, which a note says.

    Raises:
        CheckpointNotFound: there is no checkpoint; the same on every rank.
        DamagedCheckpoint: a file is missing or differs; the same on every rank.
    """
    ranks = all_ranks("read_start")
    folder = StepFolder(Path(ranks.on_main(lambda: str(resolve_checkpoint(path)))))
    manifest = verify_on_all(folder, verify, ranks)
    return ranks.attempt(lambda: _read_start(folder, manifest, topology, ranks))


def restore(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    keep: Collection[str] = (),
) -> Restored:
    """Collective: every rank. Phase two of a resume: fill model, optimizer and scheduler in place.

    The model may be plain or wrapped by DDP, FSDP2, `torch.compile` or activation checkpointing,
    the optimizer and scheduler by accelerate; whatever is None is left out. `keep` names
    hyper-parameters (`lr`, `weight_decay`) whose values in the given optimizer win over the stored
    ones; with `lr` the place on the schedule is kept. `keep=("schedule",)` recomputes the current
    rate from the scheduler as it is built now.

    Raises:
        StateMismatch: lists tensors that are missing, unexpected, of another shape or would lose
            precision; nothing has been changed then.
        DamagedCheckpoint: what is stored cannot be read.
    """
    ranks = all_ranks("restore")
    folder = StepFolder(Path(ranks.on_main(lambda: str(resolve_checkpoint(path)))))
    plan = ranks.attempt(lambda: _plan(folder, model, optimizer))
    ranks.attempt(lambda: fill_all(plan.source, plan.weights, plan.keys))
    num_entries = 0
    if optimizer is not None:
        ranks.attempt(lambda: _fill_optimizer(folder, plan))
        num_entries = ranks.attempt(lambda: _install(plan, model, optimizer, keep))
    if scheduler is not None:
        ranks.attempt(lambda: _restore_scheduler(folder, scheduler, optimizer, keep))
    return Restored(num_tensors=len(plan.weights), num_optimizer_entries=num_entries)


def load_weights(model: nn.Module, path: str | Path, *, allow_cast: bool = False) -> int:
    """Collective: every rank. Fill a model's parameters and buffers in place; how many there were.

    `path` is anything `resolve_checkpoint` understands, or any folder or file of safetensors
    weights, or a DCP folder keyed by FQN. With `allow_cast` narrower dtypes are accepted.

    Raises:
        StateMismatch: as for `restore`; nothing has been changed then.
    """
    ranks = all_ranks("load_weights")
    where = Path(ranks.on_main(lambda: str(_weights_folder(path))))

    def plan() -> tuple[Source, dict[str, Shard], dict[str, str]]:
        source, weights = _open_weights(where), model_shards(model)
        other = aliases(model)
        keys = match(source.tensors, weights, other, where="weights", allow_cast=allow_cast)
        return source, weights, keys

    source, weights, keys = ranks.attempt(plan)
    ranks.attempt(lambda: fill_all(source, weights, keys))
    return len(weights)


@dataclass(frozen=True)
class _Plan:
    source: Source
    weights: Mapping[str, Shard]
    keys: Mapping[str, str]
    index: Mapping[str, Any]
    allocation: Allocation | None
    optimizer_source: Source | None


def _plan(folder: StepFolder, model: nn.Module, optimizer: Any) -> _Plan:
    """Open everything and compare names, shapes and dtypes before anything is touched."""
    source, weights = _open_weights(folder.pretrained_model), model_shards(model)
    keys = match(source.tensors, weights, aliases(model), where="weights")
    if optimizer is None:
        return _Plan(source, weights, keys, {}, None, None)
    index = load_json(folder.optimizer_index.read_bytes(), str(folder.optimizer_index))
    inner = inner_optimizer(optimizer)
    problems = list(check_index(index, model, inner))
    if problems:
        raise StateMismatch(problems[:10])
    states = DcpSource(folder.optimizer)
    stored = {key: (entry.shape, entry.dtype) for key, entry in states.tensors.items()}
    allocation = allocate(index, stored, model, inner)
    match(states.tensors, allocation.shards, {}, where="optimizer")
    return _Plan(source, weights, keys, index, allocation, states)


def _fill_optimizer(folder: StepFolder, plan: _Plan) -> None:
    assert plan.allocation is not None
    assert plan.optimizer_source is not None
    fill_all(plan.optimizer_source, plan.allocation.shards, {})


def _install(plan: _Plan, model: nn.Module, optimizer: Any, keep: Collection[str]) -> int:
    assert plan.allocation is not None
    num_entries = install(plan.allocation, plan.index, model, inner_optimizer(optimizer), keep)
    stored = plan.index["state"].values()
    expected = sum(len(entry["tensors"]) + len(entry["values"]) for entry in stored)
    if num_entries != expected:
        raise StateMismatch.of("optimizer", f"took {num_entries} of {expected} stored entries.")
    scaler, state = getattr(optimizer, "scaler", None), plan.index.get("scaler")
    if scaler is not None and state:
        scaler.load_state_dict(state)
    return num_entries


def _restore_scheduler(
    folder: StepFolder, scheduler: Any, optimizer: Any, keep: Collection[str]
) -> None:
    state = load_json(folder.scheduler.read_bytes(), str(folder.scheduler))
    if state is None:
        raise StateMismatch.of("scheduler", "was not saved in this checkpoint.")
    inner = inner_scheduler(scheduler)
    inner.load_state_dict(state)
    groups = inner.optimizer.param_groups if hasattr(inner, "optimizer") else []
    if "lr" in keep and hasattr(inner, "base_lrs"):
        inner.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
    if "schedule" in keep and isinstance(inner, LambdaLR):
        factors = [function(inner.last_epoch) for function in inner.lr_lambdas]
        for group, base, factor in zip(groups, inner.base_lrs, factors, strict=True):
            group["lr"] = base * factor
    if keep and groups:
        inner._last_lr = [group["lr"] for group in groups]


def _read_start(folder: StepFolder, manifest: Manifest, topology: Topology, ranks: Ranks) -> Start:
    facts = load_json(folder.training_step.read_bytes(), str(folder.training_step))
    rng, notes = _read_rng(folder, manifest, topology, facts["seed"], ranks.rank)
    config = folder.train_config
    return Start(
        path=folder.path,
        manifest=manifest,
        data_state=load_json(folder.data.read_bytes(), str(folder.data)),
        train_config=config.read_text(encoding="utf-8") if config.is_file() else None,
        rng=rng,
        notes=tuple(notes),
    )


def _read_rng(
    folder: StepFolder, manifest: Manifest, topology: Topology, seed: int, rank: int
) -> tuple[RngState | DerivedRng, list[str]]:
    saved = manifest.topology.world_size
    if saved != topology.world_size:
        note = (
            f"random streams: derived from seed, step and rank, because the checkpoint holds those "
            f"of {saved} ranks and this run has {topology.world_size}."
        )
        return DerivedRng(derived_seed(seed, manifest.step, rank)), [note]
    path = folder.rng(rank)
    try:
        return RngState(safetensors_load(path.read_bytes())), []
    except SafetensorError as error:
        raise DamagedCheckpoint.of(path, f"is no safetensors file: {error}.") from error


def _open_weights(folder: Path) -> Source:
    """Safetensors where there are any, else DCP; `folder` may also be one file."""
    if folder.is_file() or any(folder.glob("model*.safetensors")):
        return SafetensorsSource(folder)
    for dcp in (folder / "dcp", folder):
        if (dcp / DCP_METADATA).is_file():
            return DcpSource(dcp)
    if any(folder.glob("*.safetensors")):
        return SafetensorsSource(folder)
    raise CheckpointNotFound.of(
        folder,
        "holds neither *.safetensors nor dcp/.metadata.",
        "Give a folder that holds weights.",
    )


def _weights_folder(path: str | Path) -> Path:
    given = Path(path).expanduser().absolute()
    holds = given.is_dir() and (
        any(given.glob("*.safetensors")) or (given / DCP_METADATA).is_file()
    )
    if holds or (given.is_file() and given.suffix == ".safetensors"):
        return given
    return StepFolder(resolve_checkpoint(given)).pretrained_model
