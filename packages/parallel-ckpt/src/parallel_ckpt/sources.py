"""The two formats that weights and optimizer state are read from, box by box."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import filesystem, metadata

from parallel_ckpt.dtypes import TORCH_DTYPES
from parallel_ckpt.errors import DamagedCheckpoint
from parallel_ckpt.layout import DCP_METADATA
from parallel_ckpt.shards import Shard, narrow, overlap
from parallel_ckpt.stored import Stored, relative_files, volume


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
    """A folder in torch's distributed checkpoint format, keyed by FQN."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _read_metadata(folder / DCP_METADATA)
        entries = self._metadata.state_dict_metadata
        tensors = {
            key: entry
            for key, entry in entries.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        self._tensors = {
            key: Stored(tuple(entry.size), entry.properties.dtype) for key, entry in tensors.items()
        }
        self._chunks = {key: entry.chunks for key, entry in tensors.items()}
        foreign = sorted(set(entries) - set(self._tensors))
        if foreign:
            raise DamagedCheckpoint.of(folder, f"holds pickled objects: {foreign[:3]}.")
        names = {info.relative_path for info in self._metadata.storage_data.values()}
        self._files = relative_files(folder, names)

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What is there, by key."""
        return self._tensors

    def fill(self, key: str, target: Shard) -> int:
        """See `Source`."""
        count = 0
        for chunk in self._chunks[key]:
            box = overlap((target.offsets, target.sizes), (chunk.offsets, chunk.sizes))
            if box is None:
                continue
            stored = self._read(key, chunk)
            narrow(target.local, box, target.offsets).copy_(narrow(stored, box, chunk.offsets))
            count += volume(box)
        return count

    def _read(self, key: str, chunk: metadata.ChunkStorageMetadata) -> torch.Tensor:
        info = self._metadata.storage_data[metadata.MetadataIndex(key, chunk.offsets)]
        path = self._files[info.relative_path]
        try:
            with path.open("rb") as file:
                if info.offset + info.length > os.fstat(file.fileno()).st_size:
                    raise EOFError("the file is shorter than .metadata says")
                data = os.pread(file.fileno(), info.length, info.offset)
            tensor: torch.Tensor = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
        except Exception as error:  # torch.load raises a dozen kinds for damaged bytes
            raise DamagedCheckpoint.of(path, f"cannot be read at {key}: {error}.") from error
        if tuple(tensor.shape) != tuple(chunk.sizes):
            raise DamagedCheckpoint.of(path, f"holds another shape for {key} than .metadata says.")
        return tensor


_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[(module, name)]
        if module == "pathlib" and name in ("Path", "PosixPath", "PurePosixPath"):
            return lambda *parts: "/".join(parts)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda text: torch.strided
        raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint needs")


def _read_metadata(path: Path) -> metadata.Metadata:
    try:
        with path.open("rb") as file:
            document = _Unpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint.of(path, f"cannot be read: {error}.") from error
    if not isinstance(document, metadata.Metadata):
        raise DamagedCheckpoint.of(path, "is no DCP metadata.")
    return document
