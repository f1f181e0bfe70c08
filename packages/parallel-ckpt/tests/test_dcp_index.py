"""The index beside `.metadata` says what that says, and a damaged or crafted one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_ckpt import CheckpointSaver, DamagedCheckpoint, StepFolder
from parallel_ckpt.formats.dcp import read_dcp
from parallel_ckpt.formats.dcp_index import Row, index_bytes, read_index
from parallel_ckpt.formats.tensor_files import OpenFiles
from parallel_ckpt.save.dcp import finish, write_part
from parallel_ckpt.state.shards import shard_of
from parallel_ckpt.store.contents import Contents
from parallel_config import CheckpointFormat, Topology

TENSORS = {
    "matrix": torch.randn(4, 3),
    "zero dims": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "half": torch.randn(5).half(),
    "many dims": torch.randn((1,) * 30 + (2,)),
}


def test_the_index_and_the_metadata_lead_to_the_same_bytes(tmp_path: Path) -> None:
    shards = {name: shard_of(tensor, name) for name, tensor in TENSORS.items()}
    finish(tmp_path, [write_part(tmp_path, shards, 0)])
    ours, torchs, files = read_index(tmp_path), read_dcp(tmp_path), OpenFiles()
    assert ours.tensors.keys() == torchs.tensors.keys() == TENSORS.keys()
    assert (ours.files, ours.paths, ours.objects) == (torchs.files, torchs.paths, torchs.objects)
    for name, tensor in torchs.tensors.items():
        found = ours.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        located = []
        for piece in tensor.pieces:
            with files.located(name, piece, tensor.dtype) as (_, elements):
                located.append(elements)
        assert list(found.pieces) == located


def test_a_tensor_may_lie_in_boxes_of_any_grid(tmp_path: Path) -> None:
    """Two columns of two and three rows, as two mesh axes that shard two dims would leave them."""
    boxes = [((r, c), (2 if r == 0 else 3, 2)) for r in (0, 2) for c in (0, 2)]
    rows = [
        Row("w", "float32", (5, 4), at, sizes, f"__{i}_0.distcp", 64, 8 * sizes[0], i)
        for i, (at, sizes) in enumerate(boxes)
    ]
    (tmp_path / "index.json").write_bytes(index_bytes(rows))
    pieces = read_index(tmp_path).tensors["w"].pieces
    assert [(p.box.offsets, p.box.sizes, p.crc32) for p in pieces] == [
        (at, sizes, i) for i, (at, sizes) in enumerate(boxes)
    ]


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        inner: Any = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


ROWS = ("tensors", "w", 2)
DAMAGE = {
    "version": (put("index_version", value=2), "has index_version 2, but 1 is known"),
    "leaves the folder": (put("files", value=["../x"]), "does not have a list of files"),
    "no tensors": (put("tensors", value=[]), "does not have tensors"),
    "no tensor": (put("tensors", "w", value=7), "has something else than a tensor at 'w'"),
    "dtype": (put("tensors", "w", 0, value="float"), "has 'w' without a dtype or shape"),
    "shape": (put("tensors", "w", 1, value=[4, -1]), "has 'w' without a dtype or shape"),
    "short row": (put(*ROWS, value=[0] * 7), "does not have rows of 8 numbers for 'w'"),
    "no row": (put(*ROWS, value=[]), "does not have a row for 'w'"),
    "fraction": (put(*ROWS, 0, value=0.0), "does not have rows of 8 numbers for 'w'"),
    "true": (put(*ROWS, 0, value=True), "does not have rows of 8 numbers for 'w'"),
    "huge": (put(*ROWS, 1, value=2**62), "does not have rows of 8 numbers for 'w'"),
    "file": (put(*ROWS, 0, value=1), "has 'w' in a file that it does not name"),
    "before the file": (put(*ROWS, 1, value=-1), "has 'w' at impossible bytes"),
    "bytes": (put(*ROWS, 2, value=31), "has a chunk of 'w' in too many or too few bytes"),
    "outside": (put(*ROWS, 4, value=3), "has a chunk that leaves 'w' of shape (4, 2)"),
    "negative": (put(*ROWS, 4, value=-1), "has a chunk that leaves 'w' of shape (4, 2)"),
    "part": (put("tensors", "w", 1, value=[5, 2]), "has 8 of 10 elements of 'w'"),
    "same bytes": (put("tensors", "v", 2, 1, value=95), "has two tensors in the same bytes of"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_an_index_that_contradicts_itself_is_refused(kind: str, tmp_path: Path) -> None:
    change, words = DAMAGE[kind]
    rows = [
        Row("w", "float32", (4, 2), (0, 0), (4, 2), "a", 64, 32, 1),
        Row("v", "float32", (2,), (0,), (2,), "a", 96, 8, 1),
    ]
    document = json.loads(index_bytes(rows))
    path = tmp_path / "index.json"
    path.write_text(json.dumps(document))
    assert read_index(tmp_path).tensors.keys() == {"w", "v"}
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DamagedCheckpoint) as caught:
        read_index(tmp_path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_overlapping_boxes_are_refused(tmp_path: Path) -> None:
    rows = [Row("w", "uint8", (4,), (at,), (2,), "a", 64 * i, 2, 1) for i, at in enumerate((0, 1))]
    (tmp_path / "index.json").write_bytes(index_bytes(rows))
    with pytest.raises(DamagedCheckpoint, match="has overlapping chunks of 'w'"):
        read_index(tmp_path)


def test_only_an_index_that_the_manifest_lists_is_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    form = CheckpointFormat.DCP
    with CheckpointSaver(tmp_path, topology=Topology(), checkpoint_format=form) as saver:
        path = saver.save(step=1, samples_seen=0, model=model)
    step = StepFolder(path)
    contents = Contents.read(step)
    assert contents.dcp_document(step.dcp).name == "index.json"
    read = contents.read_dcp(step.dcp)
    assert not any(piece.in_archive for t in read.tensors.values() for piece in t.pieces)
    # One that was put there later belongs to nothing, whatever it says.
    (step.dcp / "index.json").write_text("{}")
    known = tuple(r for r in contents.manifest.files if not r.path.endswith("dcp/index.json"))
    assert len(known) == len(contents.manifest.files) - 1
    older = Contents(step, replace(contents.manifest, files=known))
    assert older.read_dcp(step.dcp).tensors.keys() == read.tensors.keys()
