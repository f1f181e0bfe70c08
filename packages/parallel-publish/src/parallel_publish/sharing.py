"""What of a document may leave this machine: no absolute path of it, and no token."""

from __future__ import annotations

import json
import re
from pathlib import Path, PureWindowsPath
from typing import Any

from parallel_ckpt.layout import TRAIN_CONFIG

DOCUMENTS = ("config.json", TRAIN_CONFIG)
"""Files of a model that may name folders of the machine that trained it."""
REMOVED = "removed"
BYTE_ORDER_MARK = "\ufeff"
"""Some editors begin a file with it; JSON has none."""
# Tokens of the Hub begin so. Shorter words are not tokens: they may be names such as hf_cache.
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{12,}\b")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
# Only the end of a name counts: `use_task_token` is hidden, but `tokens`, a number of them, is
# not.
_SECRET_NAMES = re.compile(r"(?:^|_)(?:token|password|passwd|secret|api_key)$", re.IGNORECASE)


def shareable(text: str) -> str:
    """A JSON document without absolute paths of this machine and without secrets.

    Of a path the last part stays: `/data/me/drawers` becomes `drawers`, which says what it was and
    is found where a folder of that name lies. A text with nothing to hide comes back unchanged, and
    so does one that is not JSON.
    """
    try:
        document = json.loads(text.removeprefix(BYTE_ORDER_MARK))
    except ValueError:
        return text
    cleaned = _clean("", document)
    # Writing JSON anew changes spaces and the spelling of numbers: what needs no change stays.
    return text if cleaned == document else json.dumps(cleaned, indent=2) + "\n"


def shareable_bytes(path: Path) -> bytes | None:
    """What to send in place of the file, None when it can be sent as it is."""
    # Weights may have any size, and they hold no paths: only documents are read.
    if path.name not in DOCUMENTS:
        return None
    text = path.read_text(encoding="utf-8")
    cleaned = shareable(text)
    return None if cleaned == text else cleaned.encode()


def _clean(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(str(key), item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(name, item) for item in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET_NAMES.search(name):
        return REMOVED
    return _USER_IN_URL.sub("", _TOKEN.sub(REMOVED, _last_part(value)))


def _last_part(value: str) -> str:
    """The last part of a path that leads through this machine, anything else as it is."""
    # A text of several lines is prose, even if it begins with a slash.
    if "\n" in value:
        return value
    if value.startswith(("/", "~/", "../", "file:///")):
        return value.rstrip("/").rpartition("/")[2] or "."
    # Both are needed: a text such as "a:b" has a drive too, and is not a path of a machine.
    windows = PureWindowsPath(value)
    return windows.name or "." if windows.drive and windows.root else value
