"""Dtypes of torch by the names that files have for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.dtypes import SAFETENSORS_BY_TORCH
from parallel_ckpt.formats.limits import shown

SAFETENSORS_NAMES: Mapping[torch.dtype, str] = {
    getattr(torch, name): stored for name, stored in SAFETENSORS_BY_TORCH.items()
}


def safetensors_name(dtype: torch.dtype, where: str) -> str:
    """How safetensors calls a dtype.

    Raises:
        CheckpointError: safetensors does not have this dtype; `where` is the tensor's name.
    """
    name = SAFETENSORS_NAMES.get(dtype)
    if name is None:
        raise CheckpointError.of(
            where,
            f"has dtype {dtype}, which safetensors cannot hold.",
            "Use --checkpoint_format dcp.",
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls by this name.

    Raises:
        CheckpointError: this torch does not have it; a newer one wrote it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError.of(
            f"dtype {shown(name)}",
            f"is stored, but torch {torch.__version__} does not have it.",
            "Use the torch that wrote the checkpoint, or a newer one.",
        )
    return dtype


@cache
def torch_name(dtype: torch.dtype) -> str:
    """How torch calls a dtype, without the name of the package: `float32`."""
    return str(dtype).removeprefix("torch.")
