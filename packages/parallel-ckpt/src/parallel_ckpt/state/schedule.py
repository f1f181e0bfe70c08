"""Whether a scheduler can go on with a state that was stored, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel_ckpt.errors import StateMismatch
from parallel_ckpt.formats.limits import shown
from parallel_ckpt.state.same_kind import differences


def require_schedule(stored: Any, scheduler: Any, source: object) -> None:
    """Compare a state that the file `source` holds with that of the scheduler that is to take it.

    Raises:
        StateMismatch: the state is of another kind of scheduler, or holds a value that a scheduler
            of this kind cannot have.
    """
    own = scheduler.state_dict()
    if not isinstance(own, Mapping):
        return
    _require_kind(stored, own)
    for where, found, wanted in differences(stored, own, is_torchs=_is_torchs(scheduler)):
        raise StateMismatch.of(
            f"scheduler.{where}".rstrip("."),
            f"= {shown(found)} was saved in {source}, but it must be {wanted}.",
        )


def _require_kind(stored: Any, own: Mapping[str, Any]) -> None:
    for part in ("lr_lambdas", "_schedulers"):
        if part in own and not (isinstance(stored, Mapping) and part in stored):
            raise StateMismatch.of(
                "scheduler", f"of another kind was saved: {part} is missing in it."
            )
    if not isinstance(stored, Mapping):
        raise StateMismatch.of("scheduler", f"was saved as {shown(stored)}, not as a dict.")
    parts, found = own.get("_schedulers", ()), stored.get("_schedulers", ())
    if not isinstance(found, list | tuple):
        return  # which is told as any other value
    if parts and len(found) != len(parts):
        raise StateMismatch.of("scheduler", f"has {len(parts)} parts, but {len(found)} were saved.")
    for one, other in zip(found, parts, strict=False):
        _require_kind(one, other)


def _is_torchs(scheduler: Any) -> bool:
    """Whether its class and those of its parts come with torch."""
    parts = getattr(scheduler, "_schedulers", ())
    return type(scheduler).__module__.startswith("torch.optim.") and all(map(_is_torchs, parts))
