"""Optimizer state keyed by FQN: collected as shards, stored as JSON and DCP, put back in place.

`torch.distributed.checkpoint.state_dict` is not used: before the first update it takes a hidden
optimizer step, and it cannot load state of a parameter that never had a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from parallel_ckpt.errors import CheckpointError, DamagedCheckpoint, StateMismatch
from parallel_ckpt.formats.limits import shown
from parallel_ckpt.state.model import parameter_names
from parallel_ckpt.state.same_kind import differences
from parallel_ckpt.state.shards import Shard, shard_of
from parallel_config import Problem

EXECUTION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Keys of a group that say how a step is computed, not what: an optimizer keeps its own."""


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer holds: tensors by key, and everything plain in `index`."""

    shards: Mapping[str, Shard]
    """This rank's boxes, keyed `state.<FQN>.<name>`."""
    index: Mapping[str, Any]
    """`groups`: parameters (FQNs) and hyper-parameters; `state`: per FQN the names of its tensors
    and its plain values."""


class Stateful(Protocol):
    """What a scheduler is to a checkpoint: torch's own, accelerate's, or one of the user's."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, nested in dicts and lists."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Inverse of `state_dict`."""


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside accelerate's wrapper, or what was given."""
    found = getattr(optimizer, "optimizer", None)
    return found if isinstance(found, Optimizer) else optimizer


def class_of(optimizer: Optimizer) -> str:
    """What identifies an optimizer: the dotted path of its class, without what wraps it.

    A script's own class counts by its name alone: the script may be run as a module next time.
    """
    kind = type(inner_optimizer(optimizer))
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("__main__.")


def is_same_class(stored: str, own: str) -> bool:
    """Whether two of `class_of` are one class; a name without a module is a script's."""
    if "." in stored and "." in own:
        return stored == own
    return stored.rpartition(".")[2] == own.rpartition(".")[2]


def inner_scheduler(scheduler: Stateful | None) -> Any:
    """The torch scheduler inside accelerate's wrapper, or what was given."""
    found = getattr(scheduler, "scheduler", None)
    return found if hasattr(found, "load_state_dict") else scheduler


def tensor_key(fqn: str, name: str) -> str:
    """DCP key of one tensor of a parameter's state."""
    return f"state.{fqn}.{name}"


def collect(names: Mapping[torch.Tensor, str], wrapped: Optimizer) -> OptimizerState:
    """The optimizer's state by FQN. No collective; nothing is copied, nothing is changed.

    `names` are those of the model's parameters. `wrapped` may be accelerate's wrapper, whose fp16
    loss scaler is then kept as well.

    Raises:
        CheckpointError: a parameter is not the model's, or a value could only be pickled.
    """
    optimizer = inner_optimizer(wrapped)
    scaler = getattr(wrapped, "scaler", None)
    shards: dict[str, Shard] = {}
    state: dict[str, Any] = {}
    groups = [_group(group, i, names) for i, group in enumerate(optimizer.param_groups)]
    for parameter, entries in optimizer.state.items():
        if parameter not in names:
            raise foreign(parameter, "state")
        fqn = names[parameter]
        tensors: list[str] = []
        values: dict[str, Any] = {}
        for name, value in entries.items():
            if not isinstance(value, torch.Tensor):
                values[name] = value
                continue
            key = tensor_key(fqn, name)
            _refuse_local_state(parameter, value, key)
            shards[key] = shard_of(value, key)
            tensors.append(name)
        state[fqn] = {"tensors": sorted(tensors), "values": values}
    scaler_state = None if scaler is None else scaler.state_dict()
    return OptimizerState(shards, {"groups": groups, "state": state, "scaler": scaler_state})


def _group(group: Mapping[str, Any], index: int, names: Mapping[torch.Tensor, str]) -> Any:
    for parameter in group["params"]:
        if parameter not in names:
            raise foreign(parameter, f"param_groups[{index}]")
    hyper = {key: value for key, value in group.items() if key != "params"}
    return {"params": [names[parameter] for parameter in group["params"]], "hyper": hyper}


def foreign(parameter: torch.Tensor, where: str) -> CheckpointError:
    return CheckpointError.of(
        f"optimizer.{where}",
        f"holds a parameter of shape {tuple(parameter.shape)} that is not in the model.",
        "Give the optimizer only parameters of the model that is saved.",
    )


def _refuse_local_state(parameter: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """A plain tensor that mirrors a shard differs per rank, so one key cannot name it."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.ndim == 0:
        return
    if value.shape == parameter.to_local().shape and value.shape != parameter.shape:
        raise CheckpointError.of(
            f"optimizer.{key}",
            "is a plain tensor of this rank's shard; its place in the whole is not known.",
            "Build such state with torch.zeros_like(parameter), which keeps the sharding.",
        )


@dataclass(frozen=True)
class Allocation:
    """Fresh state tensors for an optimizer, to be filled and then installed."""

    state: Mapping[torch.Tensor, dict[str, Any]]
    shards: Mapping[str, Shard]


def require_index(index: Any, scaler: Any, source: object) -> None:
    """Raise unless it has the form that `collect` gives it, and a state that `scaler` can take.

    Raises:
        DamagedCheckpoint: names the field of the file `source`.
    """
    index = index if isinstance(index, dict) else {}
    groups, state, of_scaler = (index.get(name) for name in ("groups", "state", "scaler"))
    wrong = [] if isinstance(groups, list) else ["groups"]
    wrong += [] if isinstance(state, dict) else ["state"]
    if not wrong:
        of_groups = ((f"groups[{i}]", _has(g, "params", "hyper")) for i, g in enumerate(groups))
        of_state = ((f"state.{k}", _has(v, "tensors", "values")) for k, v in state.items())
        wrong += [where for where, is_right in (*of_groups, *of_state) if not is_right]
    own = {} if scaler is None else scaler.state_dict()
    if scaler is not None and of_scaler is not None:
        found = differences(of_scaler, own, is_torchs=True, where="scaler")
        wrong += [difference.where for difference in found]
    if wrong:
        raise DamagedCheckpoint.of(
            f"{source}: {wrong[0]}", "is missing, or has another form than a save gives it."
        )


def _has(record: Any, names: str, values: str) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get(values), dict):
        return False
    found = record.get(names)
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def check_index(
    index: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> Iterator[Problem]:
    """Whether stored groups fit the optimizer: one line per parameter or group that does not."""
    names = parameter_names(model)
    groups = index["groups"]
    saved = {fqn: i for i, group in enumerate(groups) for fqn in group["params"]}
    current: dict[str, int] = {}
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                yield foreign(parameter, f"param_groups[{i}]").problems[0]
                return
            current[names[parameter]] = i
        origins = sorted({saved[names[p]] for p in group["params"] if names[p] in saved})
        if len(origins) > 1 and not _same_hyper(index, origins):
            yield Problem(
                f"optimizer.param_groups[{i}]",
                f"joins the saved groups {origins}, whose hyper-parameters differ.",
                "Build the optimizer with the groups it was saved with.",
            )
        for origin in origins[:1]:
            hyper = {k: v for k, v in groups[origin]["hyper"].items() if k not in EXECUTION}
            for where, found, wanted in differences(hyper, group, is_torchs=False):
                yield Problem(
                    f"optimizer.param_groups[{i}].{where}",
                    f"= {shown(found)} was saved, but it must be {wanted}.",
                )
    for fqn in sorted(current.keys() - saved.keys()):
        yield Problem(f"optimizer: {fqn}", "is optimized now, but was not when it was saved.")
    for fqn in sorted(saved.keys() - current.keys()):
        yield Problem(f"optimizer: {fqn}", "was optimized when it was saved, but is not now.")


def allocate(
    index: Mapping[str, Any],
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    model: nn.Module,
    optimizer: Optimizer,
) -> Allocation:
    """Fresh tensors for every stored entry, sharded and placed as the optimizer would have them.

    Their values are arbitrary until they are filled. `stored` gives shape and dtype of each key.
    No collective.

    Raises:
        StateMismatch: index and tensors do not belong together.
    """
    parameters = {fqn: parameter for parameter, fqn in parameter_names(model).items()}
    if foreign := sorted(index["state"].keys() - parameters.keys()):
        raise StateMismatch.of(f"optimizer: {foreign[0]}", "has state, but is not in the model.")
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    wanted = {tensor_key(f, n) for f, entry in index["state"].items() for n in entry["tensors"]}
    if wanted != set(stored):
        raise StateMismatch(_differences(wanted, set(stored), "optimizer"))
    state: dict[torch.Tensor, dict[str, Any]] = {}
    shards: dict[str, Shard] = {}
    for fqn, entry in index["state"].items():
        parameter = parameters[fqn]
        state[parameter] = dict(entry["values"])
        for name in entry["tensors"]:
            key = tensor_key(fqn, name)
            shape, dtype = stored[key]
            tensor = _fresh(parameter, group_of.get(id(parameter), {}), name, shape, dtype)
            state[parameter][name] = tensor
            shards[key] = shard_of(tensor, key)
    found = sum(len(entries) for entries in state.values())
    stated = sum(len(e["tensors"]) + len(e["values"]) for e in index["state"].values())
    if found != stated:
        raise StateMismatch.of("optimizer", f"has a place for {found} of {stated} stored entries.")
    return Allocation(state, shards)


def _fresh(
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    if shape == tuple(parameter.shape) and (shape or name != "step"):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    if not shape:
        # torch keeps the step counter on the host unless the kernel itself counts: as the optimizer
        # that is filled says, not the one that was saved.
        on_device = name != "step" or group.get("fused") or group.get("capturable")
        return torch.empty(shape, dtype=dtype, device=device if on_device else "cpu")
    local = torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def install(
    allocation: Allocation,
    index: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    keep: Collection[str] = (),
) -> int:
    """Put filled state and stored hyper-parameters into the optimizer; how many entries there are.

    Hyper-parameters named in `keep` stay as they are in the optimizer, and so do those of
    `EXECUTION`. No collective.
    """
    names = parameter_names(model)
    hyper_of = {fqn: group["hyper"] for group in index["groups"] for fqn in group["params"]}
    for i, group in enumerate(optimizer.param_groups):
        if group["params"]:
            saved = hyper_of[names[group["params"][0]]]
        elif i < len(index["groups"]) and not index["groups"][i]["params"]:
            saved = index["groups"][i]["hyper"]
        else:
            continue
        _set_hyper(group, saved, keep)
        for parameter in group["params"]:
            _convert_step(allocation.state.get(parameter, {}), group)
    optimizer.state.clear()
    optimizer.state.update(allocation.state)
    return sum(len(entries) for entries in optimizer.state.values())


def _convert_step(entries: dict[str, Any], group: Mapping[str, Any]) -> None:
    """The kernels that count by themselves count in float32, whatever torch's default dtype was."""
    step = entries.get("step")
    if isinstance(step, torch.Tensor) and (group.get("fused") or group.get("capturable")):
        entries["step"] = step.to(torch.float32)


def _set_hyper(group: dict[str, Any], saved: Mapping[str, Any], keep: Collection[str]) -> None:
    wanted_lr = number_of(group.get("initial_lr", group.get("lr")))
    for key, value in saved.items():
        if key in EXECUTION or (key in keep and key != "lr"):
            continue
        put(group, key, value)
    if "lr" in keep and wanted_lr is not None:
        _rescale_lr(group, wanted_lr)


def put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a hyper-parameter; a tensor stays that tensor, a number a number.

    A captured step reads the tensor; a tensor in a number's place would choose another kernel.
    """
    current = group.get(key)
    if isinstance(current, torch.Tensor):
        current.fill_(number_of(value))
    else:
        group[key] = number_of(value) if isinstance(current, float) else value


def _rescale_lr(group: dict[str, Any], wanted: float) -> None:
    """Keep the place on the schedule's curve, whose height the new base rate sets."""
    base, current = group.get("initial_lr"), number_of(group["lr"])
    lr = wanted if base is None else ratio(current, number_of(base)) * wanted
    if base is not None:
        group["initial_lr"] = wanted
    put(group, "lr", lr)


def ratio(current: float, base: float) -> float:
    return current / base if base else 1.0


def number_of(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _same_hyper(index: Mapping[str, Any], origins: list[int]) -> bool:
    hyper = [index["groups"][i]["hyper"].items() for i in origins]
    values = [{k: v for k, v in items if k not in EXECUTION} for items in hyper]
    return all(found == values[0] for found in values)


def _differences(wanted: set[str], found: set[str], where: str) -> Iterator[Problem]:
    for key in sorted(wanted - found):
        yield Problem(f"{where}: {key}", "is listed in the index but its tensor is missing.")
    for key in sorted(found - wanted):
        yield Problem(f"{where}: {key}", "is stored but not listed in the index.")
