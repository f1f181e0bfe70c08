"""Whether a scheduler can go on with a state that was stored, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from parallel_ckpt.errors import StateMismatch
from parallel_ckpt.formats.checked_json import MAX_COUNT
from parallel_ckpt.formats.limits import shown

_COUNTS = ("last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter")
"""Numbers that torch's schedulers count with; `last_epoch` begins at -1."""


def require_schedule(stored: Any, own: Any) -> None:
    """Compare a stored state with the state of the scheduler that is to take it.

    torch takes whatever it is given: `load_state_dict` replaces attributes by name. A list of
    another length or a number out of range would only be noticed updates later, or never.

    Raises:
        StateMismatch: the state is of another kind of scheduler, or holds a value that a scheduler
            of this kind cannot have.
    """
    if not isinstance(own, Mapping):
        return
    for part in ("lr_lambdas", "_schedulers"):
        if part in own and not (isinstance(stored, Mapping) and part in stored):
            raise StateMismatch.of(
                "scheduler", f"of another kind was saved: {part} is missing in it."
            )
    if not isinstance(stored, Mapping):
        raise StateMismatch.of("scheduler", f"was saved as {shown(stored)}, not as a dict.")
    parts = own.get("_schedulers", ())
    if parts and len(stored["_schedulers"]) != len(parts):
        found = len(stored["_schedulers"])
        raise StateMismatch.of("scheduler", f"has {len(parts)} parts, but {found} were saved.")
    for i, part in enumerate(parts):
        require_schedule(stored["_schedulers"][i], part)
    for key in own.keys() & stored.keys():
        if (wanted := _complaint(key, stored[key], own[key])) is not None:
            raise StateMismatch.of(
                f"scheduler.{key}", f"= {shown(stored[key])} was saved, but it must be {wanted}."
            )


def _complaint(key: str, stored: Any, own: Any) -> str | None:
    """What the value must be; None where it may be what it is."""
    if key in _COUNTS:
        whole = type(stored) is int and -1 <= stored < MAX_COUNT
        return None if whole else f"a whole number from -1 to {MAX_COUNT - 1}"
    if isinstance(own, bool):
        return None if isinstance(stored, bool) else "true or false"
    if isinstance(own, int | float):
        # Infinite ones are right: the best value so far begins there.
        return None if _is_number(stored) else "a number"
    if isinstance(own, list | tuple) and own and all(_is_number(item) for item in own):
        sound = isinstance(stored, list | tuple) and len(stored) == len(own)
        return None if sound and all(map(_is_number, stored)) else f"{len(own)} numbers"
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and value.ndim == 0:  # a rate may be one
        value = value.item()
    if type(value) is int:
        return abs(value) < MAX_COUNT
    return isinstance(value, float) and not math.isnan(value)
