"""`PARALLEL_ALLOW_ACCELERATE_ENV=1`: accelerate's variables become fields of the config.

This happens before anything is built from the config. So the environment wins in one place, every
part of a run sees the same values, and each change can be shown to the user.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from parallel_config.accelerator import AcceleratorConfig
from parallel_config.environment import TRUE_WORDS, environment_wins
from parallel_config.errors import ConfigError, Problem

_Parse = Callable[[str], Any]


def with_environment(
    config: AcceleratorConfig, environ: Mapping[str, str] | None = None
) -> tuple[AcceleratorConfig, tuple[str, ...]]:
    """The config with the values of the environment, and a line for each field that changed.

    Without `PARALLEL_ALLOW_ACCELERATE_ENV=1` the config is returned as it is. A second call changes
    nothing more.

    Raises:
        ConfigError: a variable has a value that its field cannot take.
    """
    environ = os.environ if environ is None else environ
    if not environment_wins(environ):
        return config, ()
    lines = []
    for name, path, parse in _FIELDS:
        text = environ.get(name, "").strip()
        if not text:
            continue
        value, found = _parsed(name, text, parse), _get(config, path)
        # A plain `accelerate launch` exports many of these with the default; only a difference is
        # reported.
        if value is not None and value != found:
            config = _replaced(config, path, value)
            lines.append(f"accelerator.{path}: {found} -> {value} ({name} = {text!r})")
    return config, tuple(lines)


def _one_of(*allowed: str) -> _Parse:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"it must be one of {', '.join(allowed)}")
        return text.lower()

    return parse


def _count(text: str) -> int:
    # int() alone would also take "-1" and "1_0".
    if not text.isdecimal():
        raise ValueError("it must be a whole number")
    return int(text)


def _backend(text: str) -> str | None:
    # "no" switches the compilation off (`compile.enable`) and does not name a backend.
    return None if text.lower() == "no" else text.lower()


def _flag(text: str) -> bool:
    return text.lower() in TRUE_WORDS


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


# None from a parser leaves the field as it is.
_FIELDS: tuple[tuple[str, str, _Parse], ...] = (
    ("ACCELERATE_MIXED_PRECISION", "mixed_precision", _one_of("no", "bf16", "fp16")),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation.steps", _count),
    # One variable for two fields: accelerate compiles when it names any backend but "no".
    ("ACCELERATE_DYNAMO_BACKEND", "compile.enable", lambda text: text.lower() != "no"),
    ("ACCELERATE_DYNAMO_BACKEND", "compile.backend", _backend),
    (
        "ACCELERATE_DYNAMO_MODE",
        "compile.mode",
        _one_of("default", "reduce-overhead", "max-autotune"),
    ),
    ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "compile.fullgraph", _flag),
    ("FSDP_RESHARD_AFTER_FORWARD", "fsdp.reshard_after_forward", _flag),
    ("FSDP_OFFLOAD_PARAMS", "fsdp.cpu_offload", _flag),
    ("FSDP_TRANSFORMER_CLS_TO_WRAP", "fsdp.wrap_modules", _names),
    (
        "FSDP_ACTIVATION_CHECKPOINTING",
        "activation_checkpointing.mode",
        lambda text: "full" if _flag(text) else "none",
    ),
)


def _parsed(name: str, text: str, parse: _Parse) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(
            Problem(name, f"= {text!r}, but {error}.", f"Change or unset {name}.")
        ) from None


def _get(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


def _replaced(config: Any, path: str, value: Any) -> Any:
    head, _, rest = path.partition(".")
    inner = _replaced(getattr(config, head), rest, value) if rest else value
    return dataclasses.replace(config, **{head: inner})
