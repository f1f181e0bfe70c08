"""Reads flags that hold a mapping, of names or of numbers: OLD=NEW pairs, or one JSON mapping."""

from __future__ import annotations

import json
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo


def mappings() -> ConstructorRegistry:
    """How tyro reads a mapping: the flag replaces the whole of it, and no word empties it.

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

    @registry.primitive_rule
    def numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[str, float]] | None:
        if info.type != dict[str, float]:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[NAME=NUMBER ...]",
            instance_from_str=_read_numbers,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{name}={number}" for name, number in value.items()],
        )

    return registry


def _read_numbers(words: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, text in _read(words, "NAME=NUMBER").items():
        try:
            found[name] = float(text)
        except ValueError:
            raise ValueError(f"{name!r} is given {text!r}, but it must be a number") from None
    return found


def _read(words: list[str], form: str = "OLD=NEW") -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        for old, new in _pairs(word, form):
            if old in found:
                raise ValueError(f"{old!r} is given twice")
            found[old] = new
    return found


def _pairs(word: str, form: str) -> list[tuple[str, str]]:
    if not word.lstrip().startswith("{"):
        old, equals, new = word.partition("=")
        if not (old and equals and new):
            raise ValueError(f"{word!r} is not a pair {form}")
        return [(old, new)]
    # As pairs: a dict would keep the last of two equal keys without a word.
    pairs: Any = json.loads(word, object_pairs_hook=list)
    found = []
    for name, value in pairs:
        if form == "NAME=NUMBER" and type(value) in (int, float):
            value = str(value)
        if not isinstance(value, str):
            raise ValueError(f"{name!r} is given {value!r}, but a name is a text")
        found.append((name, value))
    return found
