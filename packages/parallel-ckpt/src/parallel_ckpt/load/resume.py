"""Resuming in two phases: what must be known before the model is built, then its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from parallel_ckpt.errors import DamagedCheckpoint, StateMismatch
from parallel_ckpt.layout import StepFolder
from parallel_ckpt.load.fill import fill_all, match, refuse_untied
from parallel_ckpt.load.sources import Source, dcp_source, weights_of
from parallel_ckpt.ranks import all_ranks
from parallel_ckpt.state.anew import require_anew, start_anew
from parallel_ckpt.state.model import aliases, drop_gradients, model_shards
from parallel_ckpt.state.optimizer import (
    Allocation,
    allocate,
    check_index,
    class_of,
    inner_optimizer,
    inner_scheduler,
    install,
    is_same_class,
    put,
    require_index,
)
from parallel_ckpt.state.plain_json import load_json
from parallel_ckpt.state.rng import DerivedRng, RngState, derived_seed
from parallel_ckpt.state.schedule import require_schedule
from parallel_ckpt.state.shards import Shard
from parallel_ckpt.state.torch_dtypes import torch_dtype
from parallel_ckpt.store.contents import Contents
from parallel_ckpt.store.find import resolve_checkpoint, verify_on_all
from parallel_ckpt.store.integrity import Verify
from parallel_ckpt.store.manifest import Manifest
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
    """Text of the run's config, None when it was not saved."""
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


DEVICE_STREAM_DERIVED = (
    "random stream of the GPU: derived from seed, step and rank, because the checkpoint was saved "
    "by a run on the CPU."
)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `restore` put back."""

    num_tensors: int
    """Weights and buffers of the model."""
    num_optimizer_entries: int
    """Entries of the optimizer's state over all parameters."""
    starts_anew: bool = False
    """Whether the optimizer is of another class, so that nothing of the saved one was taken."""
    notes: tuple[str, ...] = ()
    """What the log should say: an optimizer that starts anew, gradients that were dropped."""


def read_start(path: str | Path, *, topology: Topology, verify: Verify = "full") -> Start:
    """Collective: every rank. Phase one of a resume: check every file, read all but the tensors.

    `topology` is that of the run that resumes; on another world size than the saved one the random
    streams are derived anew, which a note says.

    Raises:
        CheckpointNotFound: there is no checkpoint; the same on every rank.
        DamagedCheckpoint: a file is missing or differs; the same on every rank.
    """
    ranks = all_ranks("read_start")
    folder = StepFolder(Path(ranks.from_main(lambda: str(resolve_checkpoint(path)))))
    manifest = verify_on_all(folder, verify, ranks)
    return ranks.together(lambda: _read_start(Contents(folder, manifest), topology, ranks.rank))


def restore(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    keep: Collection[str] = (),
    verify: Verify | None = None,
    allow_optimizer_change: bool = False,
) -> Restored:
    """Collective: every rank. Phase two of a resume: fill model, optimizer and scheduler in place.

    The model may be plain or wrapped by DDP, FSDP2, `torch.compile` or activation checkpointing,
    the optimizer and scheduler by accelerate; whatever is None is left out. `keep` names
    hyper-parameters (`lr`, `weight_decay`) whose values in the given optimizer win over the stored
    ones; with `lr` the place on the schedule is kept. `keep=("schedule",)` recomputes the current
    rate from the scheduler as it is built now. How the optimizer computes (`fused`, `foreach`,
    `capturable`, `differentiable`) is never taken from a checkpoint. Gradients that the model holds
    are dropped: they are not of these weights.

    An optimizer of another class than the saved one is refused. With `allow_optimizer_change` it
    starts anew, as if it were just built, and only the place on the schedule is kept. A checkpoint
    of format_version 1 does not name the class: with this option the optimizer then starts anew in
    any case.

    **Checksums are not compared here**, so that damaged values may be loaded: `read_start`
    has compared them just before. Where it has not been called, give `verify="full"`.

    Raises:
        StateMismatch: lists tensors that are missing, unexpected, of another shape or would lose
            precision, or says that the scheduler was not saved, or that the optimizer is of another
            class; nothing has been changed then.
        DamagedCheckpoint: what is stored cannot be read, or differs from what was committed; in
            the second case nothing has been changed.
    """
    ranks = all_ranks("restore")
    folder = StepFolder(Path(ranks.from_main(lambda: str(resolve_checkpoint(path)))))
    if verify is not None:
        verify_on_all(folder, verify, ranks)
    plan = ranks.together(
        lambda: _plan(folder, model, optimizer, scheduler, allow_optimizer_change)
    )
    ranks.together(lambda: fill_all(plan.source, plan.weights, plan.keys))
    notes = [*plan.notes, *ranks.together(lambda: drop_gradients(model))]
    num_entries = 0
    if plan.starts_anew:
        ranks.together(lambda: _start_anew(plan, model, optimizer))
        keep = ("lr", "schedule")
    elif optimizer is not None:
        ranks.together(lambda: _fill_optimizer(plan))
        num_entries = ranks.together(lambda: _install(plan, model, optimizer, keep))
    if scheduler is not None:
        ranks.together(lambda: _restore_scheduler(plan, scheduler, keep))
    return Restored(
        num_tensors=len(plan.weights),
        num_optimizer_entries=num_entries,
        starts_anew=plan.starts_anew,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Plan:
    source: Source
    weights: Mapping[str, Shard]
    keys: Mapping[str, str]
    index: Mapping[str, Any]
    allocation: Allocation | None
    optimizer_source: Source | None
    scheduler: Any
    starts_anew: bool = False
    """Whether the optimizer takes its place on the schedule from the index, and nothing else."""
    notes: tuple[str, ...] = ()


def _plan(
    folder: StepFolder, model: nn.Module, optimizer: Any, scheduler: Any, allow_change: bool
) -> _Plan:
    """Open everything and compare names, shapes and dtypes before anything is touched."""
    contents = Contents.read(folder)
    source, weights = weights_of(contents), model_shards(model)
    tied = aliases(model)
    keys = match(source.tensors, weights, tied, where="weights")
    refuse_untied(source, weights, tied, keys, where="weights")
    schedule = None if scheduler is None else _plan_scheduler(contents, scheduler)
    if optimizer is None:
        return _Plan(source, weights, keys, {}, None, None, schedule)
    index = _document(contents, folder.optimizer_index)
    require_index(index, getattr(optimizer, "scaler", None), folder.optimizer_index)
    inner = inner_optimizer(optimizer)
    if (note := _change_of_class(contents.manifest, inner, allow_change)) is not None:
        require_anew(model, inner)
        return _Plan(source, weights, keys, index, None, None, schedule, True, (note,))
    problems = list(check_index(index, model, inner))
    if problems:
        raise StateMismatch(problems[:10])
    states = dcp_source(folder.optimizer, contents)
    stored = {key: (t.shape, torch_dtype(t.dtype)) for key, t in states.tensors.items()}
    allocation = allocate(index, stored, model, inner)
    match(states.tensors, allocation.shards, {}, where="optimizer")
    return _Plan(source, weights, keys, index, allocation, states, schedule)


def _change_of_class(manifest: Manifest, optimizer: Optimizer, allowed: bool) -> str | None:
    """A line about the optimizer that starts anew; None where it goes on.

    Names of state do not identify an optimizer: Adam and AdamW have the same, and would each go on
    as the other.
    """
    own = class_of(optimizer)
    stored = None if manifest.optimizer is None else manifest.optimizer.class_name
    if not manifest.names_optimizer:
        return f"optimizer: the state of {own} starts anew, as requested." if allowed else None
    if stored is None or is_same_class(stored, own):
        return None
    if allowed:
        return f"optimizer: {stored} -> {own}, whose state starts anew."
    raise StateMismatch.of(
        "optimizer",
        f"is {own}, but the checkpoint holds the state of {stored}.",
        "Use the one that was saved, or allow_optimizer_change=True "
        "(ptrain: --allow_optimizer_change), which starts its state anew.",
    )


def _start_anew(plan: _Plan, model: nn.Module, optimizer: Any) -> None:
    start_anew(plan.index, model, inner_optimizer(optimizer))
    scaler, state = getattr(optimizer, "scaler", None), plan.index.get("scaler")
    if scaler is not None and state:
        scaler.load_state_dict(state)


def _plan_scheduler(contents: Contents, scheduler: Any) -> Any:
    state = _document(contents, contents.folder.scheduler)
    if state is None:
        raise StateMismatch.of("scheduler", "was not saved in this checkpoint.")
    require_schedule(state, inner_scheduler(scheduler), contents.folder.scheduler)
    return state


def _fill_optimizer(plan: _Plan) -> None:
    assert plan.allocation is not None
    assert plan.optimizer_source is not None
    fill_all(plan.optimizer_source, plan.allocation.shards, {})


def _install(plan: _Plan, model: nn.Module, optimizer: Any, keep: Collection[str]) -> int:
    assert plan.allocation is not None
    num_entries = install(plan.allocation, plan.index, model, inner_optimizer(optimizer), keep)
    scaler, state = getattr(optimizer, "scaler", None), plan.index.get("scaler")
    if scaler is not None and state:
        scaler.load_state_dict(state)
    return num_entries


def _restore_scheduler(plan: _Plan, scheduler: Any, keep: Collection[str]) -> None:
    inner = inner_scheduler(scheduler)
    inner.load_state_dict(plan.scheduler)
    groups = inner.optimizer.param_groups if hasattr(inner, "optimizer") else []
    if "lr" in keep and hasattr(inner, "base_lrs"):
        inner.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
    if "schedule" in keep and isinstance(inner, LambdaLR):
        factors = [function(inner.last_epoch) for function in inner.lr_lambdas]
        for group, base, factor in zip(groups, inner.base_lrs, factors, strict=True):
            put(group, "lr", base * factor)
    if keep and groups:
        inner._last_lr = [group["lr"] for group in groups]


def _read_start(contents: Contents, topology: Topology, rank: int) -> Start:
    folder = contents.folder
    seed = _document(contents, folder.training_step)["seed"]
    rng, notes = _read_rng(contents, topology, seed, rank)
    has_config = folder.train_config in contents.records
    return Start(
        path=folder.path,
        manifest=contents.manifest,
        data_state=_document(contents, folder.data),
        train_config=folder.train_config.read_text(encoding="utf-8") if has_config else None,
        rng=rng,
        notes=tuple(notes),
    )


def _document(contents: Contents, path: Path) -> Any:
    return load_json(contents.read_bytes(path), str(path))


def _read_rng(
    contents: Contents, topology: Topology, seed: int, rank: int
) -> tuple[RngState | DerivedRng, list[str]]:
    saved = contents.manifest.topology.world_size
    if saved != topology.world_size:
        note = (
            f"random streams: derived from seed, step and rank, because the checkpoint holds those "
            f"of {saved} ranks and this run has {topology.world_size}."
        )
        return DerivedRng(derived_seed(seed, contents.manifest.step, rank)), [note]
    path = contents.folder.rng(rank)
    device_seed = derived_seed(seed, contents.manifest.step, rank)
    try:
        rng = RngState(safetensors_load(contents.read_bytes(path)), device_seed)
    except SafetensorError as error:
        raise DamagedCheckpoint.of(path, f"is not a safetensors file: {error}.") from error
    return rng, [DEVICE_STREAM_DERIVED] if rng.lacks_device else []
