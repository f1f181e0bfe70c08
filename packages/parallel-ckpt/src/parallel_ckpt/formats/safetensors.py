"""Safetensors files and their index: read, checked to the last byte, and how new ones look.

Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_ckpt.errors import CheckpointError, DamagedCheckpoint
from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.checked_json import is_count, parse_json
from parallel_ckpt.formats.dtypes import (
    ITEM_BYTES,
    TORCH_BY_SAFETENSORS,
    is_shape,
    num_bytes,
)
from parallel_ckpt.formats.limits import MAX_HEADER_BYTES, MAX_INDEX_BYTES, METADATA, shown
from parallel_ckpt.formats.stored import Piece, StoredTensor
from parallel_ckpt.layout import SAFETENSORS, rank_files


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, from the start of the file."""
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says it holds, in the order of the data."""

    tensors: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]
    data_begin: int
    """Where the data starts, in bytes from the start of the file."""
    size_bytes: int
    """Of the whole file."""


def read_tensors(files: Iterable[Path], index: Path | None = None) -> dict[str, StoredTensor]:
    """The tensors of all files by name; `index` is compared with them where there is one.

    Raises:
        DamagedCheckpoint: a file or the index is damaged, or two of them contradict each other.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, entry in read_header(file).tensors.items():
            if name in tensors:
                raise DamagedCheckpoint.of(
                    file, f"holds {shown(name)}, which another file holds too."
                )
            piece = Piece(Box.whole(entry.shape), file, entry.begin, entry.num_bytes)
            dtype = TORCH_BY_SAFETENSORS[entry.dtype]
            tensors[name] = StoredTensor(dtype, entry.shape, (piece,) if entry.num_bytes else ())
    if index is not None and (odd := read_index(index).keys() ^ tensors.keys()):
        raise DamagedCheckpoint.of(
            index, f"and its files differ in tensors: {shown(sorted(odd)[:3])}."
        )
    return tensors


def read_header(path: Path) -> Header:
    """Read and check the header of one file; the tensors fill the rest of it without a gap.

    Raises:
        DamagedCheckpoint: says what was found.
    """
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
                raise DamagedCheckpoint.of(
                    path,
                    f"is not a whole safetensors file: header of {length} bytes in a file of "
                    f"{size_bytes}, at most {MAX_HEADER_BYTES} are read.",
                )
            text = file.read(length)
    except OSError as error:
        raise DamagedCheckpoint.of(path, f"cannot be read: {error.strerror}.") from error
    return parse_header(text, size_bytes, path)


def parse_header(text: bytes, size_bytes: int, source: Path) -> Header:
    """Check the JSON text of a header against the size of its file.

    Raises:
        DamagedCheckpoint: `source` is what the message calls the file.
    """
    document = parse_json(text, source)
    data_begin = 8 + len(text)
    metadata = document.pop(METADATA, {})
    if not _is_text_map(metadata):
        raise DamagedCheckpoint.of(source, f"has {METADATA} that is not a map of texts.")
    entries = {name: _entry(name, value, source) for name, value in document.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes))
    end = 0
    for name, entry in ordered:
        if entry.begin != end:
            raise DamagedCheckpoint.of(
                source, f"has {shown(name)} at byte {entry.begin}, but it must begin at {end}."
            )
        end += entry.num_bytes
    if data_begin + end != size_bytes:
        raise DamagedCheckpoint.of(
            source, f"has {size_bytes - data_begin} bytes of data; its header describes {end}."
        )
    tensors = {
        name: HeaderEntry(entry.dtype, entry.shape, data_begin + entry.begin, entry.num_bytes)
        for name, entry in ordered
    }
    return Header(tensors, metadata, data_begin, size_bytes)


def read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor, from a `model.safetensors.index.json`.

    Raises:
        DamagedCheckpoint: it is something else, or a name in it leads out of the folder.
    """
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise DamagedCheckpoint.of(path, f"has more than {MAX_INDEX_BYTES} bytes.")
        document = parse_json(path.read_bytes(), path)
    except OSError as error:
        raise DamagedCheckpoint.of(path, f"cannot be read: {error.strerror}.") from error
    weight_map = document.get("weight_map")
    if not _is_text_map(weight_map) or not weight_map:
        raise DamagedCheckpoint.of(path, "does not have a weight_map of texts.")
    for file in set(weight_map.values()):
        if not is_file_name(file):
            raise DamagedCheckpoint.of(path, f"names {shown(file)}, which is not a file beside it.")
    return dict(weight_map)


def is_file_name(name: str) -> bool:
    """Whether a stored name means a file in the folder itself, on any system."""
    return name not in ("", ".", "..") and not any(char in name for char in "/\\:\0")


def _entry(name: str, value: Any, source: Path) -> HeaderEntry:
    """As stored: `begin` counts from the start of the data."""
    label = f"has {shown(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedCheckpoint.of(source, f"{label} without just dtype, shape and data_offsets.")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DamagedCheckpoint.of(source, f"{label} of unknown dtype {shown(dtype)}.")
    if not isinstance(shape, list) or not is_shape(shape):
        raise DamagedCheckpoint.of(source, f"{label} of impossible shape {shown(shape)}.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise DamagedCheckpoint.of(source, f"{label} at impossible offsets {shown(offsets)}.")
    begin, end = offsets
    if end - begin != num_bytes(dtype, shape):
        raise DamagedCheckpoint.of(
            source,
            f"{label} in {end - begin} bytes, but {dtype} {shape} takes {num_bytes(dtype, shape)}.",
        )
    return HeaderEntry(dtype, tuple(shape), begin, end - begin)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


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
    """First bytes of a file that holds these tensors one after another.

    Raises:
        CheckpointError: there are more of them than a reader would take.
    """
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    begin = 0
    for name in names:
        form = forms[name]
        end = begin + form.num_bytes
        header[name] = {"dtype": form.dtype, "shape": form.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError.of(
            "weights",
            f"need a safetensors header of {len(text):,} bytes for the {len(names):,} tensors of "
            f"one file, but at most {MAX_HEADER_BYTES:,} are read.",
            "Use a smaller --checkpoint.max_shard_size, or --checkpoint_format dcp.",
        )
    return struct.pack("<Q", len(text)) + text


def index_bytes(files: Mapping[str, Sequence[str]], forms: Mapping[str, Form]) -> bytes:
    """Text of the index of several files.

    Raises:
        CheckpointError: it is larger than a reader would take.
    """
    document = {
        "metadata": {"total_size": sum(form.num_bytes for form in forms.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    if len(text) > MAX_INDEX_BYTES:
        raise CheckpointError.of(
            "weights",
            f"need an index of {len(text):,} bytes, but at most {MAX_INDEX_BYTES:,} are read.",
            "Use --checkpoint_format dcp.",
        )
    return text
