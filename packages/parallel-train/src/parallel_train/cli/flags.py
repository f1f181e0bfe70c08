"""Reads what tyro leaves open: booleans that take a word, and where the positional stands.

The table of flags is read from the dataclasses, so that no list has to be kept by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from parallel_config import ConfigError, Problem

# About 30 years: a timedelta overflows at 8.6e13 s, and infinity is not one.
_LONGEST_S = 1e9
MANY = -1
"""Arity of a flag that takes any number of values."""
OPEN = -2
"""Arity of a boolean that may be None, which leaves it open."""
BOOLEANS = (0, OPEN)


def flag_table(*configs: object) -> dict[str, int]:
    """Flag name (dotted, underscores) to the number of values it takes; booleans 0 or `OPEN`."""
    return {name: arity for config in configs for name, arity in _walk(config, "")}


def normalize(argv: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """Rewrite every spelling of a boolean to the two that tyro knows.

    `--x`, `--no-x`, `--x true|false`, `--x=true|false`; of a nested flag `--a.no-x` and
    `--no-a.x` alike. Only the words true and false are taken as a value, so that a positional
    after a bare boolean stays one.

    Raises:
        ConfigError: a boolean is given another value by `=`.
    """
    result: list[str] = []
    index = 0
    while index < len(argv):
        token = argv[index]
        index += 1
        name, value = _split(token)
        # An unknown flag passes as it is: tyro reports it, with the names that come near.
        arity = flags.get((name or "").removeprefix("no."))
        if name is None or arity not in BOOLEANS:
            result.append(token)
            continue
        negated = name.startswith("no.")
        name = name.removeprefix("no.")
        if value is None and index < len(argv) and _is_value(argv[index], arity):
            value = argv[index]
            index += 1
        if arity == OPEN and (value or "").lower() == "none":
            result += [f"--{name}", "None"]
            continue
        # `--no-x false` is x: the two negations meet.
        truth = _truth(name, value) != negated
        # tyro wants a word for a boolean that may be None.
        result += [f"--{name}", str(truth)] if arity == OPEN else [_boolean(name, truth)]
    return result


def positionals(argv: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """The words of `argv` that are neither flags nor values of flags."""
    found: list[str] = []
    index = 0
    while index < len(argv):
        token = argv[index]
        index += 1
        if not token.startswith("--"):
            if not token.startswith("-"):
                found.append(token)
            continue
        name, value = _split(token)
        # An unknown flag most likely takes one value; tyro refuses it later anyway.
        arity = flags.get((name or "").removeprefix("no."), 1)
        if value is None and arity in BOOLEANS and index < len(argv):
            index += _is_value(argv[index], arity)
        elif value is None and arity == MANY:
            while index < len(argv) and not argv[index].startswith("--"):
                index += 1
        elif value is None and arity not in BOOLEANS:
            # A pair that may be None is left out by this one word.
            index += 1 if argv[index : index + 1] == ["None"] else arity
    return found


def value_of(argv: Sequence[str], name: str) -> str | None:
    """The last value given to `--name`, None when it is absent."""
    found: str | None = None
    for index, token in enumerate(argv):
        flag, value = _split(token)
        if flag == name:
            following = argv[index + 1] if index + 1 < len(argv) else None
            # Without a break: of a repeated flag the last one wins, as in tyro.
            found = following if value is None else value
    return found


def name_of(token: str) -> str | None:
    """The flag's name (dotted, underscores, without a negation), None for what is not a flag."""
    name = _split(token)[0]
    return None if name is None else name.removeprefix("no.")


def seconds(name: str, value: float | str) -> float:
    """Read a time to wait for.

    Raises:
        ConfigError: it is not a number, or not above 0.
    """
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= _LONGEST_S:
        raise ConfigError(
            Problem(
                f"--{name}", f"= {value}, but it must be a number of seconds above 0.", "Use 600."
            )
        )
    return number


def is_given(argv: Sequence[str], prefix: str) -> bool:
    """Whether any flag is `--prefix` or lies below it."""
    names = (_split(token)[0] for token in argv)
    return any(
        name is not None
        and (
            name.removeprefix("no.") == prefix or name.removeprefix("no.").startswith(prefix + ".")
        )
        for name in names
    )


def _walk(config: object, prefix: str) -> Iterator[tuple[str, int]]:
    hints = get_type_hints(type(config), include_extras=False)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{name}.")
        else:
            yield name, _arity(hints[field.name])


def _arity(hint: Any) -> int:
    if hint is bool:
        return 0
    if set(get_args(hint)) == {bool, type(None)}:
        return OPEN
    if get_origin(hint) is dict:
        return MANY
    # `X | None` is read as X.
    options = get_args(hint) if get_origin(hint) is not tuple else (hint,)
    for option in options or (hint,):
        if get_origin(option) in (list, tuple, set, frozenset):
            inner = get_args(option)
            return MANY if get_origin(option) is not tuple or Ellipsis in inner else len(inner)
    return 1


def _split(token: str) -> tuple[str | None, str | None]:
    """Dotted name (negation as a leading `no.`) and value of a `--flag[=value]` token."""
    if not token.startswith("--") or token == "--":
        return None, None
    name, equals, value = token[2:].partition("=")
    name = name.replace("-", "_")
    head, dot, leaf = name.rpartition(".")
    if name.startswith("no_"):
        name = f"no.{name[3:]}"
    # tyro writes the negation of a nested flag at its last part: --a.no-x.
    elif leaf.startswith("no_"):
        name = f"no.{head}{dot}{leaf[3:]}"
    return name, value if equals else None


def _is_value(word: str, arity: int) -> bool:
    return word.lower() in ("true", "false") or (arity == OPEN and word.lower() == "none")


def _truth(name: str, value: str | None) -> bool:
    if value is None or value.lower() == "true":
        return True
    if value.lower() == "false":
        return False
    raise ConfigError(
        Problem(
            f"--{name}",
            f"= {value!r}, but a boolean takes true, false or no value.",
            f"Use --{name} or {_boolean(name, False)}.",
        )
    )


def _boolean(name: str, value: bool) -> str:
    if value:
        return f"--{name}"
    head, dot, leaf = name.rpartition(".")
    return f"--{head}{dot}no-{leaf}"
