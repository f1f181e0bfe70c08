"""Values from files that may be damaged or made to do harm. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel_ckpt.errors import DamagedCheckpoint

MAX_COUNT = 2**62
"""More bytes, and more of anything, than there can be: a larger number is damaged or crafted."""


def is_count(value: object) -> bool:
    """Whether it is an integer from 0 up to what there may be of anything; True is not one."""
    return type(value) is int and 0 <= value < MAX_COUNT


def parse_json(text: bytes | str, source: Path) -> dict[str, Any]:
    """A JSON object without a key twice.

    Raises:
        DamagedCheckpoint: it is something else; the message calls the document `source`.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        document = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint.of(source, f"is not a JSON document: {error}.") from error
    if not isinstance(document, dict):
        raise DamagedCheckpoint.of(source, "holds JSON, but not an object.")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("an object has the same key twice")
    return document
