"""The items of DCP files that we write ourselves are those that torch writes, and torch reads them.

These are canaries: a torch whose items differ from ours fails here, by the record that differs.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from parallel_ckpt.formats import dcp_template
from parallel_ckpt.formats.dcp import read_dcp
from parallel_ckpt.formats.dcp_template import MAX_ELEMENT_BYTES, template_of
from parallel_ckpt.formats.dtypes import TORCH_ITEM_BYTES
from parallel_ckpt.formats.tensor_files import OpenFiles
from parallel_ckpt.save.dcp import THREADED_BYTES, finish, write_part
from parallel_ckpt.state.shards import shard_of

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:B?Comple\w+ support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
DTYPES = [name for name in TORCH_ITEM_BYTES if hasattr(torch, name)]
SHAPES = [(), (0,), (1,), (2, 3), (300, 2), (4, 0, 3), (70_000,), (1,) * 30]
VIEWS = {
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "every other": torch.arange(12.0)[::2],
    "a part": torch.arange(12.0)[3:7],
    "repeated": torch.tensor([1.5]).expand(3, 2),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.randn(3)),
}


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def values(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """All kinds of bits, NaN among them, except where not every byte is a value."""
    kind = getattr(torch, dtype)
    if kind == torch.bool:
        return torch.randint(0, 2, shape).bool()
    num_bytes = math.prod(shape) * TORCH_ITEM_BYTES[dtype]
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(kind).reshape(shape)


def records(item: bytes) -> dict[str, bytes]:
    """The records of an item in their order, with checked checksums."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        assert archive.testzip() is None
        found = {name: archive.read(name) for name in archive.namelist()}
    # torch marks each value of the description for a second use that never comes.
    found["archive/data.pkl"] = pickletools.optimize(found["archive/data.pkl"])
    assert len(found.pop("archive/.data/serialization_id")) == 40
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d{math.prod(shape)}")
def test_an_item_holds_what_torch_writes(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, shape)
    template = template_of(dtype, shape)
    assert template is not None
    ours = template.head + raw(tensor) + template.tail(zlib.crc32(raw(tensor)))
    assert len(ours) == template.length
    assert len(template.head) % 64 == 0
    theirs = io.BytesIO()
    torch.save(tensor, theirs)
    assert list(records(ours).items()) == list(records(theirs.getvalue()).items())
    read = torch.load(io.BytesIO(ours), weights_only=True)
    assert (read.dtype, read.shape, read.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert raw(read) == raw(tensor)


def test_what_a_template_cannot_express_is_left_to_torch() -> None:
    assert template_of("qint8", (2,)) is None
    assert template_of("uint8", (MAX_ELEMENT_BYTES,)) is not None
    assert template_of("uint8", (MAX_ELEMENT_BYTES + 1,)) is None
    assert template_of("float32", (1 << 40, 1 << 40)) is None


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    shards = {name: shard_of(tensor, name) for name, tensor in tensors.items()}
    finish(folder, [write_part(folder, shards, 0)])


def test_readers_of_torch_and_ours_read_every_dtype_and_view(tmp_path: Path) -> None:
    tensors = {f"of {dtype}": values(dtype, (3, 5)) for dtype in DTYPES} | VIEWS
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    save(tmp_path / "dcp", tensors)
    loaded = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt", weights_only=True)
    folder, files = read_dcp(tmp_path / "dcp"), OpenFiles()
    for name, tensor in tensors.items():
        assert raw(loaded[name]) == raw(tensor), name
        assert converted[name].dtype == tensor.dtype, name
        assert raw(converted[name]) == raw(tensor), name
        stored = folder.tensors[name]
        assert (stored.dtype, stored.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        for piece in stored.pieces:
            with files.located(name, piece, stored.dtype) as (_, found):
                assert found.strides is None
                content = found.file.read_bytes()[found.begin : found.begin + found.num_bytes]
                assert content == raw(tensor), name
                assert found.crc32 == zlib.crc32(content)


def test_an_item_without_template_is_written_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_template, "MAX_ELEMENT_BYTES", 700)
    tensors = {"large": torch.arange(1_009.0).t(), "small": torch.ones(2), "l": torch.ones(13, 17)}
    save(tmp_path, tensors)
    assert template_of("float32", (1_009,)) is None
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_many_bytes_lie_in_a_file_for_each_thread_and_few_in_one(tmp_path: Path) -> None:
    half = torch.arange(THREADED_BYTES // 4, dtype=torch.int32)
    save(tmp_path / "two", {"a": half, "b": -half, "c": torch.ones(3)})
    save(tmp_path / "one", {"a": half[:9], "b": -half[:9], "c": torch.ones(3)})
    save(tmp_path / "none", {})
    names = {p.name: sorted(f.name for f in p.glob("*.distcp")) for p in tmp_path.iterdir()}
    assert names == {"two": ["__0_0.distcp", "__0_1.distcp"], "one": ["__0_0.distcp"], "none": []}
    loaded = {"a": torch.zeros_like(half), "b": torch.zeros_like(half), "c": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "two", no_dist=True)
    assert torch.equal(loaded["a"], half)
    assert torch.equal(loaded["b"], -half)
    assert loaded["c"].tolist() == [1, 1, 1]
