"""How messages of the engine name a setting, see `parallel_config.options`."""

from __future__ import annotations

from parallel_config.options import option as _option


def option(path: str, value: str = "") -> str:
    """Both names of a field below `accelerator`, such as "fsdp.wrap_modules", with a value."""
    return _option(f"accelerator.{path}", value)
