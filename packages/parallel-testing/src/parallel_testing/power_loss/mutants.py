"""The recorded protocol with one flush or one rename taken out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel_testing.power_loss.calls import Call

_TOKEN = re.compile(r"-[0-9a-f]{12}\b|\.[0-9a-f]{12,32}\b")
_NUMBER = re.compile(r"\d{5,}")


@dataclass(frozen=True)
class Mutant:
    """One place of the product that flushes or renames, and the calls without it."""

    name: str
    """Kind, place and path; numbers and random names in the path are left out."""
    calls: tuple[Call, ...]


def mutants(calls: Sequence[Call]) -> list[Mutant]:
    """One for each flush and each rename that the product asks for, by its place and path."""
    keys = [_key(call) for call in calls]
    found = dict.fromkeys(key for key in keys if key is not None)
    return [
        Mutant(key, _without({k for k, of_call in enumerate(keys) if of_call == key}, calls))
        for key in found
    ]


def _without(taken: set[int], calls: Sequence[Call]) -> tuple[Call, ...]:
    """The other calls; later ones find what was not renamed under its old name."""
    left = []
    for index, call in enumerate(calls):
        if index not in taken:
            left.append(call)
        elif call.kind == "rename":
            left.append(replace(call, kind="alias"))
    return tuple(left)


def _key(call: Call) -> str | None:
    if call.kind not in ("fsync", "rename") or not call.site:
        return None
    paths = [call.path] + [call.target] * (call.kind == "rename")
    shown = " -> ".join(_NUMBER.sub("N", _TOKEN.sub("", path)) for path in paths)
    return f"{call.kind} {shown} [{call.site}]"
