"""Building a model without paying for it: parameters on meta, then memory, then weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_ckpt.errors import StateMismatch
from parallel_ckpt.formats.stored import StoredTensor
from parallel_ckpt.load.fill import fill_all, match, refuse_untied
from parallel_ckpt.load.sources import safetensors_source
from parallel_ckpt.state.model import aliases, model_shards
from parallel_ckpt.state.shards import Shard


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module registers is kept without memory; buffers are real.

    Buffers must be real, because those that are not saved have their values from the constructor.
    """
    # On the class: constructors build modules of any kind, and `self.weight = nn.Parameter(...)`
    # comes through here too.
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = _twin(param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _twin(param: nn.Parameter) -> nn.Parameter:
    """The parameter without memory; one for all modules that share the original."""
    twin: nn.Parameter | None = getattr(param, "_on_meta", None)
    if twin is None:
        twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        # Marks that a model has put on its parameter must not be lost.
        twin.__dict__.update(param.__dict__)
        # Kept on the parameter and not in a table by id(): the id of a parameter that was freed is
        # used again.
        param._on_meta = twin  # type: ignore[attr-defined]
    return twin


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give parameters on meta memory without values; tied ones stay tied."""
    real: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is None or not param.is_meta:
                continue
            # By identity, as tied parameters are one object in several modules.
            if id(param) not in real:
                memory = torch.empty_like(param, device=device)
                real[id(param)] = nn.Parameter(memory, requires_grad=param.requires_grad)
            module._parameters[name] = real[id(param)]


def fill(
    model: nn.Module, path: Path, *, strict: bool, allow_cast: bool, must: frozenset[str]
) -> tuple[list[str], list[str]]:
    """Fill a model from safetensors, tensor by tensor; names that are missing and unexpected.

    Both lists are empty with `strict`. Without it they are left as they are, but not those of
    `must`, which have no values yet. No collective.

    Raises:
        StateMismatch: lists what does not fit; nothing has been changed then.
    """
    source = safetensors_source(path)
    targets, tied = model_shards(model), aliases(model)
    if strict:
        keys = match(source.tensors, targets, tied, where=str(path), allow_cast=allow_cast)
        refuse_untied(source, targets, tied, keys, where=str(path))
        fill_all(source, targets, keys)
        return [], []
    stored, wanted = _common(source.tensors, targets, tied)
    missing = sorted(set(targets) - set(wanted))
    lost = sorted(must & set(missing))
    if lost:
        raise StateMismatch.of(
            path,
            f"does not hold {', '.join(lost[:10])}, which would stay without values.",
            "Use meta=False, so that they get the values of the constructor.",
        )
    keys = match(stored, wanted, tied, where=str(path), allow_cast=allow_cast)
    refuse_untied(source, wanted, tied, keys, where=str(path))
    fill_all(source, wanted, keys)
    return missing, sorted(set(source.tensors) - set(stored))


def _common(
    stored: Mapping[str, StoredTensor], targets: Mapping[str, Shard], tied: Mapping[str, str]
) -> tuple[dict[str, StoredTensor], dict[str, Shard]]:
    """Stored tensors and targets that belong together, under any name of a tied tensor."""
    home = {name: tied.get(name, name) for name in stored}
    fitting = {name: target for name, target in home.items() if target in targets}
    return (
        {name: stored[name] for name in fitting},
        {target: targets[target] for target in fitting.values()},
    )


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype of floating parameters and buffers, on meta as well."""
    model.to(dtype=dtype)


def meta_names(model: nn.Module) -> frozenset[str]:
    """Names of parameters without memory."""
    return frozenset(name for name, param in model.named_parameters() if param.is_meta)


def plain(value: Any) -> bool:
    """Whether a constructor's argument can be written to config.json and read back equal."""
    # Not tuples: JSON gives them back as lists, which are not equal.
    if isinstance(value, bool | int | float | str) or value is None:
        return True
    if isinstance(value, list):
        return all(plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    return False
