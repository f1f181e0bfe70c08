"""Reads flags that hold a mapping of names: OLD=NEW pairs, or one JSON mapping."""

from __future__ import annotations

import json
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo


def mappings() -> ConstructorRegistry:
    """How tyro reads a `dict[str, str]`: the flag replaces the whole mapping, no word empties it.

    Tyro's own way takes two words for each pair, and no new key where the default has some.
    """
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def names(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[str, str]] | None:
        if info.type != dict[str, str]:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[OLD=NEW ...]",
            instance_from_str=_read,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{old}={new}" for old, new in value.items()],
        )

    return registry


def _read(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        for old, new in _pairs(word):
            if old in found:
                raise ValueError(f"{old!r} is given twice")
            found[old] = new
    return found


def _pairs(word: str) -> list[tuple[str, str]]:
    if not word.lstrip().startswith("{"):
        old, equals, new = word.partition("=")
        if not (old and equals and new):
            raise ValueError(f"{word!r} is not a pair OLD=NEW")
        return [(old, new)]
    # As pairs: a dict would keep the last of two equal keys without a word.
    pairs: Any = json.loads(word, object_pairs_hook=list)
    for pair in pairs:
        if not isinstance(pair[1], str):
            raise ValueError(f"{pair[0]!r} is given {pair[1]!r}, but a name is a text")
    return pairs  # type: ignore[no-any-return]
