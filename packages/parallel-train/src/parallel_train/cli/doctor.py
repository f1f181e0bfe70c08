"""`ptrain doctor`: what this machine can run, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from parallel_config import ConfigError
from parallel_config.environment import accelerate_variables, check_environment
from parallel_train.cli.parsing import Parsed
from parallel_train.data.config import EMBEDDED_ROOT

_PACKAGES = ("torch", "accelerate", "safetensors", "huggingface_hub", "pyarrow", "tyro")
_EXTRAS = {
    "vision": ("torchvision", "av"),
    "sim": ("metaworld",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "plot": ("matplotlib",),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    text: str


def run(parsed: Parsed) -> int:
    """Print the findings. Returns 0 when training can run here, 1 otherwise."""
    findings = [*_interpreter(), *_packages(), *_devices(), *_extras(), *_environment(), *_disk()]
    if parsed.command.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'MISS'}  {finding.name:<12} {finding.text}")
    required = {"python", *_PACKAGES, "environment", "dataset"}
    return 0 if all(f.ok for f in findings if f.name in required) else 1


def _interpreter() -> list[Finding]:
    version = platform.python_version()
    cores = os.cpu_count() or 1
    return [Finding("python", sys.version_info >= (3, 11), f"{version}, {cores} cores")]


def _packages() -> list[Finding]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(Finding(name, True, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name, False, f"pip install {name}"))
    return found


def _devices() -> list[Finding]:
    """Kinds of run that the devices of this machine allow."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    bf16 = count > 0 and torch.cuda.is_bf16_supported()
    return [
        Finding("cuda", count > 0, f"{count} devices: {names}" if count else "none; runs on CPU"),
        Finding("bf16", bf16 or count == 0, "in hardware" if bf16 else "on CPU, slow"),
        Finding("ranks", gloo, "gloo: DDP, FSDP2 and HSDP also on CPU" if gloo else "no gloo"),
    ]


def _extras() -> list[Finding]:
    found = []
    for extra, modules in _EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        text = f'pip install "parallel-train[{extra}]"' if missing else ", ".join(modules)
        found.append(Finding(extra, not missing, text))
    return found


def _environment() -> list[Finding]:
    try:
        check_environment()
    except ConfigError as error:
        return [Finding("environment", False, "; ".join(str(p) for p in error.problems))]
    names = ", ".join(accelerate_variables())
    return [Finding("environment", True, f"set, harmless: {names}" if names else "nothing set")]


def _disk() -> list[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    return [
        Finding("dataset", (EMBEDDED_ROOT / "meta/info.json").is_file(), str(EMBEDDED_ROOT)),
        Finding("disk", free > 10**9, f"{free / 1e9:.1f} GB free here"),
    ]
