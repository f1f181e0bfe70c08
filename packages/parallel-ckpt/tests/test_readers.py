"""Files made to do harm: each is refused by name, executes nothing, and takes little memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import runpy
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from parallel_ckpt import CheckpointError, DamagedCheckpoint, load_weights
from parallel_ckpt.convert import convert
from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.dcp import parse_metadata, read_dcp
from parallel_ckpt.formats.pickles import MalformedPickle, read_pickle
from parallel_ckpt.formats.safetensors import read_header, read_index
from parallel_ckpt.formats.stored import Piece
from parallel_ckpt.inspect import inspect
from parallel_ckpt.load.sources import dcp_source
from parallel_ckpt.store.manifest import parse_manifest

FOLDER = Path("folder")


class Bomb:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def save_alone(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def entry(shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    boxes = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), boxes)


def document(shape: tuple[int, ...] = (4,), file: str = "__0_0.distcp", **changes: Any) -> bytes:
    """Metadata of one tensor `a` in one piece, with changes."""
    zeros = (0,) * len(shape)
    values: dict[str, Any] = {
        "state_dict_metadata": {"a": entry(shape, (zeros, shape))},
        "storage_data": {MetadataIndex("a", torch.Size(zeros)): _StorageInfo(file, 0, 900)},
    }
    return pickle.dumps(Metadata(**(values | changes)))


def stored(*offsets: tuple[int, ...], **changes: Any) -> dict[MetadataIndex, _StorageInfo]:
    infos = (
        _StorageInfo(**({"relative_path": "f", "offset": 900 * i, "length": 900} | changes))
        for i in range(len(offsets))
    )
    return {
        MetadataIndex("a", torch.Size(offset)): info
        for offset, info in zip(offsets, infos, strict=True)
    }


def test_a_good_document_reads_as_torch_reads_it() -> None:
    found = parse_metadata(document((4, 3)), FOLDER).tensors["a"]
    assert (found.dtype, found.shape) == ("float32", (4, 3))
    assert found.pieces == (
        Piece(Box((0, 0), (4, 3)), FOLDER / "__0_0.distcp", 0, 900, in_archive=True),
    )
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert parse_metadata(pickle.dumps(pickle.loads(document()), protocol), FOLDER).tensors


HOSTILE: dict[str, tuple[bytes, str]] = {
    "protocol 0": (pickle.dumps(pickle.loads(document()), 0), "names copy_reg._reconstructor"),
    "no pickle": (b"\x80\x04hello", "breaks off|uses opcode|garbled"),
    "nothing": (b"", "breaks off"),
    "cut": (document()[:-30], "breaks off|garbled"),
    "another class": (b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "names builtins.eval"),
    "memo of 32 GB": (b"\x80\x04Nr\xff\xff\xff\x7f.", "breaks off"),
    "text of 4 GB": (b"\x80\x04X\xff\xff\xff\xff.", "breaks off"),
    "long integer": (b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".", "integer of 255 bytes"),
    "no metadata": (pickle.dumps({"a": 1}), "something else where a Metadata belongs"),
    "absolute path": (document(file="/etc/passwd"), "which is not in the folder"),
    "way out": (document(file="../x.distcp"), "which is not in the folder"),
    "way out of Windows": (document(file="..\\x.distcp"), "which is not in the folder"),
    "negative size": (document(state_dict_metadata={"a": entry((-4,), ((0,), (-4,)))}), "shape"),
    "huge size": (document((2**62, 2**62)), "impossible shape"),
    "no storage": (document(storage_data=None), "does not have storage_data"),
    "foreign bytes": (document(storage_data=stored((1,))), "does not name the bytes of 'a'"),
    "gap": (
        document(state_dict_metadata={"a": entry((4,), ((0,), (2,)))}),
        "has 2 of 4 elements of 'a'",
    ),
    "beyond": (
        document(state_dict_metadata={"a": entry((4,), ((2,), (4,)))}),
        r"leaves 'a' of shape \(4,\)",
    ),
    "twice": (
        document(
            state_dict_metadata={"a": entry((4, 2), ((0, 0), (2, 2)), ((1, 0), (2, 2)))},
            storage_data=stored((0, 0), (1, 0)),
        ),
        "overlapping chunks",
    ),
    "same bytes": (
        document(
            state_dict_metadata={"a": entry((4,), ((0,), (2,)), ((2,), (2,)))},
            storage_data=stored((0,), (2,), offset=0),
        ),
        "two tensors in the same bytes",
    ),
    "compressed": (
        document(storage_data=stored((0,), transform_descriptors=["zstd"])),
        "compressed or otherwise transformed",
    ),
    "key that takes for ever to hash": (
        b"\x80\x04)\x94"
        + b"".join(bytes([0x68, n, 0x68, n, 0x86, 0x94]) for n in range(60))
        + b"}h\x3cNs.",
        "something else where a Metadata belongs",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_metadata_is_refused_at_once(case: str) -> None:
    data, words = HOSTILE[case]
    begin = time.monotonic()
    with pytest.raises(DamagedCheckpoint, match=words) as caught:
        parse_metadata(data, FOLDER)
    assert str(FOLDER / ".metadata") in str(caught.value)
    assert time.monotonic() - begin < 2.0


def test_torch_runs_the_command_and_we_do_not(tmp_path: Path) -> None:
    """The canary: once torch refuses this by itself, our reader may be thought over."""
    folder, mark = tmp_path / "dcp", tmp_path / "ran"
    save_alone({"model": {"a": torch.ones(4)}}, folder)
    genuine = (folder / ".metadata").read_bytes()
    metadata = pickle.loads(genuine)
    metadata.planner_data = Bomb(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    readers: list[Callable[[], object]] = [
        lambda: read_dcp(folder),
        lambda: dcp_source(folder),
        lambda: convert(folder, tmp_path / "out"),
        lambda: load_weights(torch.nn.Linear(2, 2), folder),
    ]
    for read in readers:
        with pytest.raises(
            CheckpointError, match=r"names posix\.system, which checkpoints do not need"
        ):
            read()
        assert not mark.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": {"a": torch.ones(4)}}, checkpoint_id=folder, no_dist=True)
    assert mark.exists()


def test_pickled_objects_are_never_read(tmp_path: Path) -> None:
    folder, mark = tmp_path / "dcp", tmp_path / "ran"
    save_alone({"model": {"a": torch.ones(4)}, "object": Bomb(mark)}, folder)
    mark.unlink(missing_ok=True)
    assert convert(folder, tmp_path / "out").left_out == ("object",)
    with pytest.raises(DamagedCheckpoint, match=r"holds pickled objects.*object"):
        dcp_source(folder)
    assert not mark.exists()


def test_a_stored_tensor_that_is_something_else(tmp_path: Path) -> None:
    """The item in the shard itself is a pickle too."""
    mark = tmp_path / "ran"
    for number, (value, words) in enumerate(
        {
            "bomb": (Bomb(mark), r"names posix\.system"),
            "shape": (torch.ones(3), r"holds float32 \(3,\) where .metadata says"),
            "dtype": (torch.ones(4, dtype=torch.int32), "holds int32"),
            "repeated": (torch.ones(1).expand(4), "bytes for a tensor that reaches beyond"),
        }.values()
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        item = buffer.getvalue()
        info = {MetadataIndex("a", torch.Size((0,))): _StorageInfo("f.distcp", 0, len(item))}
        (folder / "f.distcp").write_bytes(item)
        (folder / ".metadata").write_bytes(document(storage_data=info))
        with pytest.raises(CheckpointError, match=words):
            convert(folder, tmp_path / "out")
        with pytest.raises(CheckpointError, match=words):
            load_weights(_One(), folder)
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


class _One(torch.nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(shape or (4,)))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(8.0)[:1],
        torch.arange(8.0)[5:6],
        torch.arange(8.0)[2:6],
        torch.arange(8.0)[::2],
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0).reshape(3, 4)[1:, 2:],
    ],
    ids=["first", "one", "middle", "every other", "transposed", "corner"],
)
def test_a_view_of_a_larger_storage_is_read_as_it_was(tmp_path: Path, value: torch.Tensor) -> None:
    folder, shape = tmp_path / "dcp", tuple(value.shape)
    folder.mkdir()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    (folder / "f.distcp").write_bytes(buffer.getvalue())
    zeros = torch.Size((0,) * value.ndim)
    info = {MetadataIndex("a", zeros): _StorageInfo("f.distcp", 0, len(buffer.getvalue()))}
    (folder / ".metadata").write_bytes(document(shape, storage_data=info))
    load_weights(model := _One(*shape), folder)
    assert torch.equal(model.a, value)
    convert(folder, tmp_path / "out")
    load_weights(again := _One(*shape), tmp_path / "out")
    assert torch.equal(again.a, value)


def test_links_and_pipes_are_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    save_alone({"model": {"a": torch.ones(4)}}, folder)
    shard = next(folder.glob("*.distcp"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link that leads out of its folder"):
        convert(folder, tmp_path / "out")
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        convert(folder, tmp_path / "out")


def header(document: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, shape: object = None, dtype: object = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[bytes, str]] = {
    "short": (b"\x01", "not a whole safetensors file"),
    "huge length": (header({}, length=2**63), "not a whole safetensors file"),
    "length beyond": (header({}, length=100), "not a whole safetensors file"),
    "no JSON": (header(b"{]"), "not a JSON document"),
    "not an object": (header([1]), "not an object"),
    "deep": (header(b"[" * 200_000), "not a JSON document"),
    "long number": (header(b'{"a":' + b"9" * 100_000 + b"}"), "not a JSON document"),
    "twice": (header(b'{"a":{"dtype":"F32","dtype":"F32"}}'), "the same key twice"),
    "overlap": (header({"a": tensor(0, 8), "b": tensor(4, 12)}, b"0" * 12), "must begin at 8"),
    "hole": (header({"a": tensor(0, 4), "b": tensor(8, 12)}, b"0" * 12), "must begin at 4"),
    "late": (header({"a": tensor(4, 8)}, b"0" * 8), "must begin at 0"),
    "beyond": (header({"a": tensor(0, 800)}, b"0" * 8), "8 bytes of data"),
    "behind": (header({"a": tensor(0, 4)}, b"0" * 8), "8 bytes of data"),
    "backwards": (header({"a": tensor(8, 0, [1])}, b"0" * 8), "in -8 bytes"),
    "negative": (header({"a": tensor(-4, 0)}), "impossible offsets"),
    "bool": (header({"a": tensor(0, 4, [True])}, b"0" * 4), "impossible shape"),
    "product": (header({"a": tensor(0, 4, [2**40, 2**40])}, b"0" * 4), "impossible shape"),
    "dims": (header({"a": tensor(0, 4, [1] * 100)}, b"0" * 4), "impossible shape"),
    "size": (header({"a": tensor(0, 4, [2])}, b"0" * 4), r"F32 \[2\] takes 8"),
    "dtype": (header({"a": tensor(0, 4, [1], "F33")}, b"0" * 4), "unknown dtype 'F33'"),
    "list of dtypes": (header({"a": tensor(0, 4, [1], ["F32"])}, b"0" * 4), "unknown dtype"),
    "more fields": (header({"a": tensor(0, 4) | {"x": 1}}, b"0" * 4), "without just dtype"),
    "metadata": (header({"__metadata__": {"a": 1}}), "not a map of texts"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_safetensors_headers_are_refused(tmp_path: Path, case: str) -> None:
    data, words = HEADERS[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"[]", "not an object"),
        (b"{}", "does not have a weight_map"),
        (b'{"weight_map": {"a": 1}}', "does not have a weight_map of texts"),
        (b'{"weight_map": {"a": "../x"}}', "which is not a file beside it"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "which is not a file beside it"),
        (b'{"weight_map": {"a": "x"}, "weight_map": {}}', "the same key twice"),
        (b'{"weight_map": {"a": "model-1.safetensors"}}', "differ in tensors: \\['a', 'b'\\]"),
        (b'{"weight_map": {"b": "model-2.safetensors"}}', "model-2.safetensors cannot be read"),
        (b"[" * 100_000, "not a JSON document"),
    ],
)
def test_hostile_indexes_are_refused(tmp_path: Path, index: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(index)
    (tmp_path / "model-1.safetensors").write_bytes(header({"b": tensor(0, 4)}, b"0000"))
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 100_000, "not a JSON document"),
        (b'{"a": 1' + b"0" * 10_000 + b"}", "not a JSON document"),
        (b'{"step": 1, "step": 2}', "the same key twice"),
        (b"\xff\xfe", "not a JSON document"),
    ],
)
def test_hostile_manifests_are_refused(text: bytes, words: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=words):
        parse_manifest(text, Path("manifest.json"))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\\..\\x", "", ".", "a//b"])
def test_a_manifest_names_no_file_outside(name: str) -> None:
    golden = Path(__file__).parent / "golden" / "v1" / "good_single" / "manifest.json"
    manifest = json.loads(golden.read_bytes())
    manifest["files"][0]["path"] = name
    with pytest.raises(DamagedCheckpoint, match="it must stay in the checkpoint"):
        parse_manifest(json.dumps(manifest), golden)


BOUNDED = """
import sys
from pathlib import Path
from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.dcp import parse_metadata
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
try:
    parse_metadata(Path(sys.argv[1]).read_bytes(), Path("f"))
except CheckpointError as error:
    print(peak() - before)
"""


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04" + b"(" * 3_000_000,
        b"\x80\x04]\x94(" + b"h\x00" * 900_000 + b"e.",
        b"\x80\x04)\x94" + b"h\x00\x86\x94" * 200_000 + b".",
    ],
    ids=["memo", "text", "marks", "itself", "nested"],
)
def test_memory_and_time_grow_with_the_file_alone(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    command = [sys.executable, "-c", BOUNDED, str(tmp_path / "file")]
    used = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    assert int(used) * 1024 < 20_000_000 + 50 * len(data)


def test_the_machine_makes_plain_values_only() -> None:
    value = {"a": [1, -2, 2**40, 1.5, None, True, "ü", ()], "b": ((1, 2), "x" * 300)}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(value, protocol)
        assert dict(read_pickle(data, lambda module, name: False)) == value
    with pytest.raises(MalformedPickle, match=r"names collections\.Counter"):
        read_pickle(pickle.dumps(__import__("collections").Counter()), lambda module, name: False)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b"\x80\x04(\x94h\x00.", "breaks off or is garbled"),  # remembers a mark
        (b"\x80\x04}(K\x01u.", "has a key without a value"),
        (b"\x80\x04Nq\x05.", "breaks off or is garbled"),  # leaves out numbers
        (b"\x80\x04N)\x81\x94}\x94(.", "calls something that is not a class"),
        (b"\x80\x04()\x81\x94}\x94(.", "calls something that is not a class"),
        (b"\x80\x04NK\x01\x85\x94\x85\x94R\x94.", "calls something that is not a class"),
        (b"\x80\x04K\x01(K\x02K\x03ub.", "sets items of something that is not a dict"),
        (b"\x80\x04(}(K\x02K\x03ub.", "changes a _Mark"),
        (b"\x80\x04K\x01(\x86.", "breaks off or is garbled"),  # takes a mark for a value
        (b"\x80\x04\x8c\x09abc", "breaks off or is garbled"),
    ],
)
def test_runs_of_opcodes_are_checked_as_each_of_them(document: bytes, words: str) -> None:
    with pytest.raises(MalformedPickle, match=words):
        read_pickle(document, lambda module, name: True)


def test_every_protocol_of_a_metadata_says_the_same() -> None:
    """Those before 4 are read opcode by opcode, later ones in runs of them."""
    for shape in ((), (3,), (4, 3), (2, 3, 4), (1, 2, 3, 4, 5)):
        whole = pickle.loads(document(shape))
        found = [parse_metadata(pickle.dumps(whole, number), FOLDER) for number in range(2, 6)]
        assert found[0].tensors["a"].shape == shape
        assert found == [found[0]] * 4


def test_inspect_and_index_of_what_is_whole(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden" / "v1" / "good_fsdp2"
    plain = json.loads(inspect(golden).to_json())
    assert plain["tensors_by_dtype"] == {"F32": {"count": 2, "num_bytes": 544}}
    assert plain["optimizer_by_dtype"] == {"F32": {"count": 2, "num_bytes": 544}}
    index = tmp_path / "i.json"
    index.write_text('{"metadata": {}, "weight_map": {"a": "b"}}')
    assert read_index(index) == {"a": "b"}


def test_random_damage_for_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    fuzz = runpy.run_path(str(Path(__file__).with_name("fuzz_readers.py")))
    assert fuzz["main"](["2", "7"]) == 0
    assert "0 surprises" in capsys.readouterr().out
