"""What a conversion will write: files, their headers, and where each tensor goes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel_ckpt.convert.cast import Dtype, target_dtype
from parallel_ckpt.formats.dtypes import SAFETENSORS_BY_TORCH
from parallel_ckpt.formats.safetensors import Form, header_bytes, index_bytes, pack
from parallel_ckpt.formats.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor in a file that will be written."""

    name: str
    source: StoredTensor
    form: Form
    file: str
    begin: int
    """First byte, from the start of the file."""

    @property
    def dtype(self) -> str:
        """Named as in safetensors files."""
        return self.form.dtype

    @property
    def stored_dtype(self) -> str:
        """Of the source, named as in safetensors files."""
        return SAFETENSORS_BY_TORCH[self.source.dtype]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return self.form.num_bytes


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
    tensors: Mapping[str, StoredTensor], dtype: Dtype, max_shard_bytes: int
) -> list[OutputFile]:
    """Distribute the tensors over files of at most `max_shard_bytes`; a larger tensor is alone."""
    forms = {
        name: Form(target_dtype(SAFETENSORS_BY_TORCH[tensor.dtype], dtype), tensor.shape)
        for name, tensor in tensors.items()
    }
    packed = pack(forms, max_shard_bytes)
    return [_file(file, names, tensors, forms) for file, names in packed.items()]


def index_of(files: Sequence[OutputFile]) -> bytes:
    """Text of the index of several files."""
    forms = {tensor.name: tensor.form for file in files for tensor in file.tensors}
    return index_bytes({file.name: [t.name for t in file.tensors] for file in files}, forms)


def _file(
    file: str, names: list[str], tensors: Mapping[str, StoredTensor], forms: Mapping[str, Form]
) -> OutputFile:
    header = header_bytes(names, forms)
    placed: list[OutputTensor] = []
    at = len(header)
    for name in names:
        placed.append(OutputTensor(name, tensors[name], forms[name], file, at))
        at += forms[name].num_bytes
    return OutputFile(file, header, tuple(placed))
