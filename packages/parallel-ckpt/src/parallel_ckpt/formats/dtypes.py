"""Dtypes as files name them, and their sizes: what can be known of a tensor without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from parallel_ckpt.formats.checked_json import is_count
from parallel_ckpt.formats.limits import MAX_DIMS

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}
"""Bytes of one element by the dtype's name in safetensors files."""

SAFETENSORS_BY_TORCH: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""Names in safetensors files by names in torch."""

TORCH_BY_SAFETENSORS: Mapping[str, str] = {s: t for t, s in SAFETENSORS_BY_TORCH.items()}
"""Names in torch by names in safetensors files."""

TORCH_ITEM_BYTES: Mapping[str, int] = {
    **{name: ITEM_BYTES[stored] for name, stored in SAFETENSORS_BY_TORCH.items()},
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "bcomplex32": 4,
    "complex128": 16,
}
"""Bytes of one element by the dtype's name in torch: what DCP can hold.

torch's DCP cannot save those that are missing: integers of fewer than 8 bits, the `bits` types, and
quantized tensors, whose scale is not among their bytes.
"""


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor stored without gaps."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def is_shape(value: object) -> bool:
    """Whether a list or tuple is a sane shape: few dims, none negative, a product that fits."""
    if not isinstance(value, list | tuple) or len(value) > MAX_DIMS:
        return False
    if not all(map(is_count, value)):
        return False
    product: int = math.prod(dim for dim in value if dim)
    return is_count(product)
