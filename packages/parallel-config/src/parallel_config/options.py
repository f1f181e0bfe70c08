"""How messages name a setting: the flag of a command, and the field of a program of one's own."""

from __future__ import annotations

_OWNERS = {
    "accelerator": "AcceleratorConfig",
    "accelerator.gradient_accumulation": "GradientAccumulationConfig",
    "accelerator.fsdp": "FSDPConfig",
    "accelerator.ddp": "DDPConfig",
    "accelerator.compile": "CompileConfig",
    "accelerator.activation_checkpointing": "ActivationCheckpointingConfig",
    "parallelism": "ParallelismConfig",
    "ema": "EMAConfig",
}


def option(path: str, value: str = "", *, off: bool = False) -> str:
    """Both names of a field such as "accelerator.fsdp.wrap_modules", with a value.

    `off` names the flag and the value that switch a boolean off.

    >>> option("accelerator.compile.mode", "default")
    '--accelerator.compile.mode default (CompileConfig.mode)'
    >>> option("accelerator.tf32", off=True)
    '--accelerator.no_tf32 (AcceleratorConfig.tf32=False)'
    """
    section, _, field = path.rpartition(".")
    flag = f"--{section}.{'no_' if off else ''}{field} {value}".rstrip()
    return f"{flag} ({_OWNERS[section]}.{field}{'=False' if off else ''})"
