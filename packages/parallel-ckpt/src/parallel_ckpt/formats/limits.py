"""The limits that writers and readers share, and how a value from a file is shown. Needs no torch.

A reader needs limits: a crafted file must not take all memory or time. What a reader would refuse a
writer must refuse first, so no limit stands anywhere else. Decision 0012 says how they were chosen.
"""

from __future__ import annotations

from parallel_ckpt.errors import CheckpointError, printable

MAX_NAME = 4_096
"""Characters of a stored tensor's name: of a weight its FQN, of optimizer state the whole key."""
MAX_DIMS = 64
"""torch copies tensors of up to 64 dims."""
MAX_CHUNKS = 4_000_000
"""Pieces in one DCP folder: 1,000 parameters with two moments, cut over 2,000 ranks."""
MAX_METADATA_BYTES = 250 * MAX_CHUNKS
"""Of a DCP folder's `.metadata`; a chunk takes about 150 bytes."""
MAX_OPCODES = 80 * MAX_CHUNKS
"""Of a pickle; a chunk takes 68."""
MAX_STACK = 1_000_000
"""Open values of a pickle; torch's documents leave about a thousand open."""
MAX_LOOSE_CHUNKS = 64
"""Parts of one tensor that do not lie in a grid are compared two by two, up to this many."""
MAX_HEADER_BYTES = 32_000_000
"""Of one safetensors file: room for about 300,000 tensors. Parsing takes some twenty times that."""
MAX_INDEX_BYTES = 256_000_000
"""Of the index of several safetensors files."""
MAX_DEPTH = 100
"""Lists, tuples and dicts inside one another in a JSON document; its readers are recursive, and
Python stops them at about 1000 calls, of which one such value takes three."""
MAX_INT_BITS = 10_000
"""Of an integer in a JSON document; Python reads up to 4300 digits, about 14,000 bits."""
METADATA = "__metadata__"
"""Safetensors headers use this name for something else, so no tensor can have it."""

_SHOWN_CHARS = 80
_SHOWN_ITEMS = 6
_SHOWN_DEPTH = 3
_SHOWN_INT_BITS = 128


def shown(value: object) -> str:
    """A value for a message: bounded in time and length, on one line, no control characters.

    `repr` would follow a crafted value wherever it leads: a tuple that holds itself twice, 27 times
    over, is 439 bytes of a pickle and takes minutes to print.
    """
    return _shown(value, _SHOWN_DEPTH)


def _shown(value: object, depth: int) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 3] + "...")
    if isinstance(value, bytes):
        return repr(value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 3] + b"...")
    if isinstance(value, bool | float | complex | None):
        return repr(value)
    if isinstance(value, int):
        bits = value.bit_length()
        return repr(value) if bits <= _SHOWN_INT_BITS else f"an integer of {bits} bits"
    if type(value) in (list, tuple, dict):
        return _shown_items(value, depth)  # type: ignore[arg-type]
    # Any other object, a subclass of these included, might print itself as it likes.
    return f"a {printable(type(value).__name__)[:_SHOWN_CHARS]}"


_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}


def _shown_items(
    value: list[object] | tuple[object, ...] | dict[object, object], depth: int
) -> str:
    opening, closing = _BRACKETS[type(value)]
    if not value:
        return opening + closing
    if not depth:
        return f"{opening}...{closing}"
    parts: list[str] = []
    for number, item in enumerate(value):
        if number == _SHOWN_ITEMS:
            parts.append(f"... ({len(value)} in all)")
            break
        text = _shown(item, depth - 1)
        parts.append(f"{text}: {_shown(value[item], depth - 1)}" if type(value) is dict else text)
    comma = "," if type(value) is tuple and len(value) == 1 else ""
    return f"{opening}{', '.join(parts)}{comma}{closing}"


def require_name(name: str) -> None:
    """Refuse a tensor's name that readers would refuse, or that a file cannot hold.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    if len(name) > MAX_NAME:
        raise CheckpointError.of(
            f"tensor {shown(name)}",
            f"has a name of {len(name)} characters, but checkpoints hold up to {MAX_NAME}.",
        )
    if name == METADATA:
        raise CheckpointError.of(
            f"tensor {shown(name)}",
            "has a name that safetensors files reserve.",
            "Call the parameter or buffer something else.",
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError.of(
            f"tensor {shown(name)}",
            f"has half of a character in its name (a surrogate, at {error.start}), which no file "
            "can hold.",
        ) from error
