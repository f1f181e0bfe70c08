"""How messages name a setting: the flag of a command, and the field of a program of one's own."""

from __future__ import annotations

_OWNERS = {
    "": "AcceleratorConfig",
    "fsdp": "FSDPConfig",
    "ddp": "DDPConfig",
    "compile": "CompileConfig",
}


def option(path: str, value: str = "") -> str:
    """Both names of a field below `accelerator`, such as "fsdp.wrap_modules", with a value."""
    section, _, field = path.rpartition(".")
    flag = f"--accelerator.{path} {value}".rstrip()
    return f"{flag} ({_OWNERS[section]}.{field})"
