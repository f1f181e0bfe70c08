"""Names of dtypes in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parallel_ckpt.errors import CheckpointError

SAFETENSORS_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def safetensors_name(dtype: torch.dtype, where: str) -> str:
    """How safetensors calls a dtype.

    Raises:
        CheckpointError: it has no such dtype; `where` is the tensor's name.
    """
    name = SAFETENSORS_NAMES.get(dtype)
    if name is None:
        raise CheckpointError.of(
            where,
            f"has dtype {dtype}, which safetensors cannot hold.",
            "Use --checkpoint_format dcp.",
        )
    return name
