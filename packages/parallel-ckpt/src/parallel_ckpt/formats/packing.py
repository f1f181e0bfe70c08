"""What safetensors files of given tensors look like: who lies where, and the bytes around. Pure."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel_ckpt.formats.dtypes import ITEM_BYTES, num_bytes
from parallel_ckpt.formats.safetensors import METADATA
from parallel_ckpt.layout import SAFETENSORS, rank_files


@dataclass(frozen=True, slots=True)
class Form:
    """What a header says of a tensor."""

    dtype: str
    """Named as in safetensors files."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor, stored without gaps."""
        return num_bytes(self.dtype, self.shape)


def pack(forms: Mapping[str, Form], max_shard_bytes: int) -> dict[str, list[str]]:
    """Tensors of each file, in the order of their bytes; a file exceeds the limit only alone.

    Wide dtypes come first, so that each tensor begins at a multiple of its item size.
    """
    bins: list[list[str]] = [[]]
    filled = 0
    for name in sorted(forms, key=lambda name: -ITEM_BYTES[forms[name].dtype]):
        if bins[-1] and filled + forms[name].num_bytes > max_shard_bytes:
            bins.append([])
            filled = 0
        bins[-1].append(name)
        filled += forms[name].num_bytes
    files = [SAFETENSORS] if len(bins) == 1 else rank_files("model", len(bins))
    return dict(zip(files, bins, strict=True))


def header_bytes(names: Sequence[str], forms: Mapping[str, Form]) -> bytes:
    """First bytes of a file that holds these tensors one after another."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    begin = 0
    for name in names:
        form = forms[name]
        end = begin + form.num_bytes
        header[name] = {"dtype": form.dtype, "shape": form.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def index_bytes(files: Mapping[str, Sequence[str]], forms: Mapping[str, Form]) -> bytes:
    """Text of the index of several files."""
    document = {
        "metadata": {"total_size": sum(form.num_bytes for form in forms.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
