"""Stored plain values beside those of the object that is to take them: are they of one kind?

torch takes what it is given: schedulers, groups and scalers replace their values by name. A number
that is not one, or a list of another length, would only be noticed updates later, or never.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parallel_ckpt.formats.checked_json import MAX_COUNT

_COUNTS = ("last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter")
"""Numbers that torch's schedulers count with; `last_epoch` begins at -1."""


class Difference(NamedTuple):
    """A stored value that the object cannot take."""

    where: str
    """Keys and positions that lead to it: `lr_lambdas[0].power`."""
    found: object
    wanted: str
    """What it must be, as the end of a sentence."""


def differences(stored: Any, own: Any, *, is_torchs: bool, where: str = "") -> Iterator[Difference]:
    """Where `stored` cannot replace `own`; keys that only one of two dicts has are passed over.

    What torch's own classes (`is_torchs`) build as None or empty stays that. A user's class may put
    there what it likes.
    """
    wanted = _wanted(where.rpartition(".")[2], stored, own, is_torchs)
    if wanted is not None:
        yield Difference(where, stored, wanted)
    elif isinstance(own, Mapping):
        for key in own.keys() & stored.keys():
            below = f"{where}.{key}" if where else str(key)
            yield from differences(stored[key], own[key], is_torchs=is_torchs, where=below)
    elif isinstance(own, list | tuple):
        for i, (one, other) in enumerate(zip(stored, own, strict=False)):
            yield from differences(one, other, is_torchs=is_torchs, where=f"{where}[{i}]")


def _wanted(key: str, stored: Any, own: Any, is_torchs: bool) -> str | None:
    """What the value itself must be; None where it may be what it is."""
    if key in _COUNTS:
        whole = type(stored) is int and -1 <= stored < MAX_COUNT
        return None if whole else f"a whole number from -1 to {MAX_COUNT - 1}"
    if isinstance(own, bool):
        return None if isinstance(stored, bool) else "true or false"
    if is_number(own):
        # Infinite ones are right: the best value so far begins there.
        return None if is_number(stored) else "a number"
    if isinstance(own, Mapping):
        return _wanted_dict(stored, own)
    if isinstance(own, list | tuple):
        return _wanted_list(stored, own, is_torchs)
    if not is_torchs:
        return None
    if own is None:
        # Where torch keeps a function, it saves None, or the dict of an object that is called.
        return None if stored is None or isinstance(stored, Mapping) else "null or a dict"
    return "text" if isinstance(own, str) and not isinstance(stored, str) else None


def _wanted_dict(stored: Any, own: Mapping[Any, Any]) -> str | None:
    kind = Counter if isinstance(own, Counter) else Mapping
    if not isinstance(stored, kind):
        return "a Counter" if kind is Counter else "a dict"
    counts = bool(own) and all(map(is_number, own)) and all(map(is_number, own.values()))
    if counts and not (all(map(is_number, stored)) and all(map(is_number, stored.values()))):
        return "a dict of numbers"
    return "a dict with last_epoch" if "last_epoch" in own.keys() - stored.keys() else None


def _wanted_list(stored: Any, own: Sequence[Any], is_torchs: bool) -> str | None:
    numbers = bool(own) and all(map(is_number, own))
    if not isinstance(stored, list | tuple):
        return f"{len(own)} numbers" if numbers else "a list"
    if (numbers or is_torchs) and len(stored) != len(own):
        return f"{len(own)} numbers" if numbers else f"a list of {len(own)}"
    return f"{len(own)} numbers" if numbers and not all(map(is_number, stored)) else None


def is_number(value: Any) -> bool:
    """Whether it is a number that a step can compute with; a tensor of no dims may be one."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:  # a rate may be one
        value = value.item()
    if type(value) is int:
        return abs(value) < MAX_COUNT
    return isinstance(value, float) and not math.isnan(value)
