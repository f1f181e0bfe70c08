"""The two formats that weights and optimizer state are read from, box by box."""

from __future__ import annotations

from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from parallel_ckpt.dcp_reader import DcpChunk, read_dcp
from parallel_ckpt.dtypes import TORCH_DTYPES
from parallel_ckpt.errors import DamagedCheckpoint
from parallel_ckpt.shards import Shard, narrow, overlap
from parallel_ckpt.stored import Stored, volume
from parallel_ckpt.stored_items import MalformedItem, find_payload


def weight_files(folder: Path) -> list[Path]:
    """Files of a model's weights; processors keep tensors of their own beside them."""
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))


class SafetensorsSource:
    """One safetensors file, or all of a folder; each rank reads only the rows it holds."""

    def __init__(self, path: Path) -> None:
        files = [path] if path.is_file() else weight_files(path)
        self._tensors: dict[str, Stored] = {}
        self._files: dict[str, Any] = {}
        for file in files:
            self._open(file)

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What is there, by name."""
        return self._tensors

    def fill(self, key: str, target: Shard) -> int:
        """See `Source`."""
        part = self._files[key].get_slice(key)
        if not target.shape:
            target.local.copy_(self._files[key].get_tensor(key))
            return 1
        rows = tuple(
            slice(start, start + size)
            for start, size in zip(target.offsets, target.sizes, strict=True)
        )
        target.local.copy_(part[rows])
        return target.local.numel()

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - no dict
                part = file.get_slice(name)
                dtype = TORCH_DTYPES.get(part.get_dtype())
                if dtype is None or name in self._tensors:
                    raise DamagedCheckpoint.of(
                        path, f"holds {name} twice, or in dtype {part.get_dtype()}."
                    )
                self._tensors[name] = Stored(tuple(part.get_shape()), dtype)
                self._files[name] = file
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint.of(path, f"is no safetensors file: {error}.") from error


class DcpSource:
    """A folder in torch's distributed checkpoint format, by FQN; nothing in it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._stored = read_dcp(folder)
        if self._stored.objects:
            raise DamagedCheckpoint.of(
                folder, f"holds pickled objects, which are never read: {self._stored.objects[:3]}."
            )
        self._tensors = {
            key: Stored(tensor.shape, getattr(torch, tensor.dtype))
            for key, tensor in self._stored.tensors.items()
        }

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What is there, by key."""
        return self._tensors

    def fill(self, key: str, target: Shard) -> int:
        """See `Source`."""
        count = 0
        for chunk in self._stored.tensors[key].chunks:
            box = overlap((target.offsets, target.sizes), (chunk.offsets, chunk.sizes))
            if box is None:
                continue
            stored = self._read(key, chunk)
            narrow(target.local, box, target.offsets).copy_(narrow(stored, box, chunk.offsets))
            count += volume(box)
        return count

    def _read(self, key: str, chunk: DcpChunk) -> torch.Tensor:
        path = self._stored.folder / chunk.file
        try:
            with path.open("rb", buffering=0) as file:
                payload = find_payload(file.fileno(), chunk, self._stored.tensors[key].dtype)
                data = bytearray(payload.num_bytes)
                file.seek(payload.begin)
                _read_into(file, memoryview(data))
        except (OSError, MalformedItem) as error:
            raise DamagedCheckpoint.of(path, f"cannot be read at {key}: {error}.") from error
        flat = torch.frombuffer(data, dtype=self._tensors[key].dtype)
        if payload.strides is None:
            return flat.reshape(chunk.sizes)
        return flat.as_strided(chunk.sizes, payload.strides, payload.first)


def _read_into(file: FileIO, data: memoryview) -> None:
    filled = 0
    while filled < len(data):
        count = file.readinto(data[filled:])
        if not count:
            raise MalformedItem("the file ends within the tensor")
        filled += count
