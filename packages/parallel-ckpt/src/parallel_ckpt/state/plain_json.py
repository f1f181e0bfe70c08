"""Plain values to JSON and back without loss: tuples, odd keys, counters and NaN survive.

Nothing is ever pickled: resuming from a stranger's checkpoint must execute nothing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallel_ckpt.errors import CheckpointError, DamagedCheckpoint
from parallel_ckpt.formats.limits import MAX_DEPTH, MAX_INT_BITS, shown

_TAGS = ("$tuple", "$items", "$counter", "$float", "$scalar")

_GARBLED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""What python and torch raise for a value that is not what its tag says, or is too deep."""


def dump_json(value: object, where: str) -> bytes:
    """The stored text of `value`.

    Raises:
        CheckpointError: something in it is not a plain value; the message says where.
    """
    encoded = encode(value, where)
    return (json.dumps(encoded, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def load_json(text: bytes, where: str) -> Any:
    """Inverse of `dump_json`.

    Raises:
        DamagedCheckpoint: the text was not written by `dump_json`.
    """
    try:
        return decode(json.loads(text))
    except _GARBLED as error:
        raise DamagedCheckpoint.of(where, f"was not written by parallel-ckpt: {error}.") from error


def encode(value: object, where: str, depth: int = 0) -> Any:
    """`value` in terms of JSON; see `dump_json`. `depth` counts the values around it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _encode_text(value, where)
    if isinstance(value, int | float):
        return _encode_number(value, where)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.ndim == 0:
        return {"$scalar": [str(value.dtype).removeprefix("torch."), encode(value.item(), where)]}
    if depth == MAX_DEPTH:  # a list that holds itself ends here too
        raise CheckpointError.of(
            f"{where[:80]}...", f"lies in more than {MAX_DEPTH} lists, tuples and dicts."
        )
    if isinstance(value, list):
        return _encode_items(value, where, depth)
    if isinstance(value, tuple):
        return {"$tuple": _encode_items(value, where, depth)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, depth)
    raise CheckpointError.of(
        where,
        f"is a {type(value).__name__}, but only plain values are kept: nothing that is unpickled "
        "on resume may enter a checkpoint.",
        "Use numbers, strings, lists, tuples and dicts.",
    )


def decode(value: Any) -> Any:
    """Inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _TAGS:
        return _decode_tagged(tag, value[tag])
    return {key: decode(item) for key, item in value.items()}


def _encode_text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError.of(
            where, f"= {shown(value)} has half of a character (a surrogate, at {error.start})."
        ) from error
    return value


def _encode_number(value: int | float, where: str) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    # Python itself refuses to read longer numbers back from text.
    if value.bit_length() > MAX_INT_BITS:
        raise CheckpointError.of(where, f"is {shown(int(value))}, but {MAX_INT_BITS} are kept.")
    return int(value)


def _encode_items(values: Sequence[object], where: str, depth: int) -> list[Any]:
    return [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(values)]


def _encode_mapping(value: Mapping[Any, Any], where: str, depth: int) -> Any:
    plain_keys = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain_keys and not isinstance(value, Counter):
        for key in value:
            _encode_text(key, f"a key of {where}")
        return {key: encode(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    items = [
        [encode(key, f"a key of {where}", depth + 1), encode(item, f"{where}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$items": items}


def _decode_tagged(tag: str, value: Any) -> Any:
    if tag == "$tuple":
        return tuple(decode(item) for item in value)
    if tag == "$float":
        return float(value)
    if tag == "$scalar":
        dtype = getattr(torch, value[0])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value[0]!r} is not a dtype")
        return torch.tensor(decode(value[1]), dtype=dtype)
    items = {decode(key): decode(item) for key, item in value}
    return Counter(items) if tag == "$counter" else items
