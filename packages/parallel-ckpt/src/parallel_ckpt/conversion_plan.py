"""What a conversion will write: files, their headers, and where each tensor goes. Pure."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from parallel_ckpt.casting import Dtype, target_dtype
from parallel_ckpt.conversion_source import SourceTensor
from parallel_ckpt.layout import SAFETENSORS, rank_files
from parallel_ckpt.tensor_names import ITEM_BYTES, num_bytes
from parallel_config import ConfigError, Problem

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor in a file that will be written."""

    name: str
    source: SourceTensor
    dtype: str
    file: str
    begin: int
    """First byte, from the start of the file."""
    num_bytes: int


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file that will be written."""

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    """In the order of their bytes, without gaps."""

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


def plan_files(
    tensors: Mapping[str, SourceTensor], dtype: Dtype, max_shard_bytes: int
) -> list[OutputFile]:
    """Distribute the tensors over files of at most `max_shard_bytes`; a larger tensor is alone.

    Wide dtypes come first in a file, so that each tensor begins at a multiple of its item size.
    """
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[target_dtype(tensors[name].dtype, dtype)])
    sizes = {
        name: num_bytes(target_dtype(source.dtype, dtype), source.shape)
        for name, source in tensors.items()
    }
    bins: list[list[str]] = [[]]
    filled = 0
    for name in order:
        if bins[-1] and filled + sizes[name] > max_shard_bytes:
            bins.append([])
            filled = 0
        bins[-1].append(name)
        filled += sizes[name]
    files = [SAFETENSORS] if len(bins) == 1 else rank_files("model", len(bins))
    return [_file(file, names, tensors, dtype) for file, names in zip(files, bins, strict=True)]


def parse_size(text: str | int) -> int:
    """Bytes of `5GB`, `500MB`, `2GiB` or a plain number.

    Raises:
        ConfigError: it is none of these, or zero.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise ConfigError(
            Problem("max_shard_size", f"= {text!r} is no size.", "Use 5GB, 500MB or 2GiB.")
        )
    return size


def _file(
    file: str, names: list[str], tensors: Mapping[str, SourceTensor], dtype: Dtype
) -> OutputFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    placed: list[tuple[str, str, int, int]] = []
    at = 0
    for name in names:
        source = tensors[name]
        wanted = target_dtype(source.dtype, dtype)
        size = num_bytes(wanted, source.shape)
        header[name] = {
            "dtype": wanted,
            "shape": list(source.shape),
            "data_offsets": [at, at + size],
        }
        placed.append((name, wanted, at, size))
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return OutputFile(
        file,
        head,
        tuple(
            OutputTensor(name, tensors[name], wanted, file, len(head) + begin, size)
            for name, wanted, begin, size in placed
        ),
    )
