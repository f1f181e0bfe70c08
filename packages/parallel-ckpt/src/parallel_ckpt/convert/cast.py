"""Floating-point numbers from one width to another, as torch rounds them. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Dtype = Literal["keep", "fp32", "bf16", "fp16"]
"""Dtype of the floating-point tensors of a result."""

_NAMES: Mapping[str, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_CASTABLE = ("F64", "F32", "F16", "BF16")
_NUMPY: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def target_dtype(stored: str, wanted: Dtype) -> str:
    """Dtype of a tensor in the result; integers, booleans and 8-bit floats stay what they are."""
    return _NAMES[wanted] if wanted != "keep" and stored in _CASTABLE else stored


def cast(data: memoryview, stored: str, wanted: str) -> memoryview:
    """The bytes of the same numbers in another dtype; ties round to even, too large is infinity."""
    if stored == wanted:
        return data
    import numpy as np  # only a cast waits for its import

    numbers = _bf16_to_fp32(data) if stored == "BF16" else np.frombuffer(data, _NUMPY[stored])
    with np.errstate(over="ignore", invalid="ignore"):
        if wanted == "BF16":
            return _bytes(_fp32_to_bf16(numbers.astype("<f4", copy=False)))
        return _bytes(numbers.astype(_NUMPY[wanted], copy=False))


def _bf16_to_fp32(data: memoryview) -> NDArray[np.float32]:
    import numpy as np

    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def _fp32_to_bf16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    import numpy as np

    bits = numbers.view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += np.uint32(0x7FFF)
    rounded += bits
    result = rounded.view("<u2")[1::2].copy()
    is_nan = np.isnan(numbers)
    if is_nan.any():
        result[is_nan] = 0x7FC0  # Rounding up the bits of a NaN could make it an infinity.
    return result


def _bytes(array: NDArray[np.generic]) -> memoryview:
    import numpy as np

    return np.ascontiguousarray(array).view(np.uint8).data.cast("B")
