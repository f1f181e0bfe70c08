"""Defaults of a run that follow its policy: used only where no flag and no file sets the option."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from parallel_train.config import TrainConfig
from parallel_train.policies.registry import POLICIES


def with_run_defaults(
    config: TrainConfig, is_given: Callable[[str], bool]
) -> tuple[TrainConfig, tuple[str, ...]]:
    """The config with its policy's `run_defaults`, and a line that names those taken.

    `is_given` says of a path whether a flag or the config file gives it.

    Raises:
        ConfigError: together with what was given they cannot be.
    """
    wanted = {
        path: value for path, value in config.policy.run_defaults().items() if not is_given(path)
    }
    if not wanted:
        return config, ()
    sections: dict[str, dict[str, object]] = {}
    for path, value in wanted.items():
        section, _, name = path.rpartition(".")
        sections.setdefault(section, {})[name] = value
    changes = sections.pop("", {})
    for section, values in sections.items():
        # All of a section at once: one by one a valid pair may pass through an invalid one.
        changes[section] = dataclasses.replace(getattr(config, section), **values)
    shown = ", ".join(f"{path} {_show(value)}" for path, value in wanted.items())
    preset = getattr(config.policy, "preset", None)
    of = f" {preset}" if preset else ""
    name = POLICIES.name_of(config.policy)
    line = f"defaults of {name}{of}: {shown} (flags and files override them)"
    return dataclasses.replace(config, **changes), (line,)  # type: ignore[arg-type]


def _show(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
