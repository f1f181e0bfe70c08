"""Values from files in messages, and the limits that writers and readers share (decision 0012)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from parallel_ckpt import CheckpointError, CheckpointSaver, DamagedCheckpoint, save_weights
from parallel_ckpt.formats import limits
from parallel_ckpt.formats.dcp import parse_metadata
from parallel_ckpt.formats.limits import MAX_NAME, shown
from parallel_ckpt.formats.pickles import Global, Made
from parallel_ckpt.inspect import inspect
from parallel_ckpt.store.manifest import Manifest
from parallel_config import CheckpointFormat, Topology


def doubled(times: int = 27) -> tuple[Any, ...]:
    """A tuple that holds itself twice, again and again: few bytes of pickle, gigabytes of text."""
    value: tuple[Any, ...] = ("x",)
    for _ in range(times):
        value = (value, value)
    return value


class Prints:
    """Prints itself for ever, were it asked."""

    def __repr__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\x1b[2Jb", r"'a\x1b[2Jb'"),
        ("x" * 100, "'" + "x" * 77 + "...'"),
        (10**5000, "an integer of 16610 bits"),
        (-5, "-5"),
        (None, "None"),
        (float("nan"), "nan"),
        (b"\x00" * 100, repr(b"\x00" * 77 + b"...")),
        ((1,), "(1,)"),
        ([], "[]"),
        ([1] * 9, "[1, 1, 1, 1, 1, 1, ... (9 in all)]"),
        ([[[[1]]]], "[[[[...]]]]"),
        ({"a": [1]}, "{'a': [1]}"),
        (Prints(), "a Prints"),
        (Made(Global("m", "n"), (doubled(),)), "a Made"),
    ],
    ids=[str(i) for i in range(14)],
)
def test_a_value_is_shown_in_few_characters(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_value_that_holds_itself_is_shown_too() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert shown(endless) == "[[[[...]]]]"
    assert len(shown(doubled())) < 200


def hostile(**changes: Any) -> bytes:
    """Metadata of one tensor `a` with hostile values in it."""
    key, offset = changes.pop("key", "a"), changes.pop("offset", torch.Size((0,)))
    chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))
    chunk.offsets = changes.pop("offsets", chunk.offsets)
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((4,)), [chunk])
    entry.chunks = changes.pop("chunks", entry.chunks)
    entry.size = changes.pop("size", entry.size)
    info = _StorageInfo(**({"relative_path": "f", "offset": 0, "length": 9} | changes))
    index = MetadataIndex("a", torch.Size((0,)))
    object.__setattr__(index, "fqn", key)
    object.__setattr__(index, "offset", offset)
    # A pickle keeps a dict as pairs; a key that takes for ever to hash must not be hashed here.
    return pickle.dumps(Metadata({"a": entry}, storage_data=Items([(index, info)])))


class Items(dict[Any, Any]):
    """Pairs that are pickled as the dict that they would make."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.pairs = pairs

    def __reduce__(self) -> tuple[Any, ...]:
        from collections import OrderedDict

        return OrderedDict, (), None, None, iter(self.pairs)


@pytest.mark.parametrize(
    "field",
    ["relative_path", "offset", "length", "key", "offsets", "chunks", "size"],
)
def test_no_message_follows_a_crafted_value(field: str) -> None:
    with pytest.raises(DamagedCheckpoint) as caught:
        parse_metadata(hostile(**{field: doubled()}), Path("folder"))
    assert len(str(caught.value)) < 500


class Named(nn.Module):
    def __init__(self, name: str, tensor: torch.Tensor | None = None) -> None:
        super().__init__()
        tensor = torch.ones(2) if tensor is None else tensor
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            self.register_parameter(name, nn.Parameter(tensor))
        else:
            self.register_buffer(name, tensor)


class Dispatches(torch.Tensor):
    """A tensor whose values lie elsewhere: saved, it would be an object to unpickle."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Dispatches:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "surrogate": (Named("a\ud800"), r"has half of a character in its name \(a surrogate, at 1\)"),
    "reserved": (Named("__metadata__"), "has a name that safetensors files reserve"),
    "long name": (Named("n" * (MAX_NAME + 1)), "has a name of 4097 characters, but checkpoints"),
    "dims": (Named("a", torch.zeros([1] * 65, dtype=torch.int8)), "of up to 64 dims"),
    "meta": (Named("a", torch.empty(2, device="meta")), "a is on meta, so it does not have values"),
    "sparse": (Named("a", torch.zeros(2, 2).to_sparse()), "a is a sparse_coo tensor, but only"),
    "int4": (Named("a", torch.empty(2, dtype=torch.int4)), "a has dtype int4, which checkpoints"),
    "uint1": (
        Named("a", torch.empty(2, dtype=torch.uint1)),
        "a has dtype uint1, which checkpoints",
    ),
    "dispatches": (
        Named("a", Dispatches(torch.ones(2, dtype=torch.int8))),
        "a is a Dispatches, wh",
    ),
    "lazy": (nn.LazyLinear(2), "does not have a shape yet: the module is lazy"),
}


@pytest.mark.parametrize("form", CheckpointFormat)
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_reader_could_give_back_is_refused_at_the_save(
    case: str, form: CheckpointFormat, tmp_path: Path
) -> None:
    model, words = REFUSED[case]
    with (
        CheckpointSaver(tmp_path, topology=Topology(), checkpoint_format=form) as saver,
        pytest.raises(CheckpointError, match=words),
    ):
        saver.save(step=1, samples_seen=1, model=model)
    assert not list((tmp_path / "checkpoints").glob("0*"))
    with pytest.raises(CheckpointError, match=words):
        save_weights(model, tmp_path / "weights")


def test_a_name_of_the_longest_length_is_kept(tmp_path: Path) -> None:
    model = Named("n" * MAX_NAME)
    with CheckpointSaver(
        tmp_path, topology=Topology(), checkpoint_format=CheckpointFormat.SAFETENSORS_DCP
    ) as saver:
        path = saver.save(step=1, samples_seen=1, model=model)
        assert not inspect(path).problems
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
        model.get_parameter("n" * MAX_NAME).sum().backward()
        optimizer.step()
        with pytest.raises(CheckpointError, match="has a name of 4118 characters"):
            saver.save(step=2, samples_seen=1, model=model, optimizer=optimizer)


def test_more_than_a_reader_takes_is_refused_at_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    for module, name, value, form, words in [
        ("save.dcp", "MAX_CHUNKS", 5, "dcp", "would hold 6 pieces of tensors, but up to 5"),
        ("save.dcp", "MAX_METADATA_BYTES", 99, "dcp", "bytes, but up to 99 are read"),
        ("formats.safetensors", "MAX_HEADER_BYTES", 99, "safetensors", "at most 99 are read"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(f"parallel_ckpt.{module}.{name}", value)
            run = tmp_path / name
            with (
                CheckpointSaver(
                    run, topology=Topology(), checkpoint_format=CheckpointFormat(form)
                ) as saver,
                pytest.raises(CheckpointError, match=words),
            ):
                saver.save(step=1, samples_seen=1, model=model)
            assert not list((run / "checkpoints").glob("0*"))
    assert limits.MAX_CHUNKS >= 4_000_000


def test_what_a_stranger_wrote_does_not_reach_the_terminal(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, topology=Topology()) as saver:
        path = saver.save(step=1, samples_seen=1, model=nn.Linear(2, 2))
    found = inspect(path)
    evil = "\x1b]0;owned\x07\x1b[2J"
    known = {k: getattr(found.manifest, k) for k in Manifest.__dataclass_fields__}
    manifest = Manifest(**(known | {"created_at": evil, "versions": {"torch": evil, evil: "1"}}))
    shown_info = type(found)(**(vars(found) | {"manifest": manifest, "problems": (evil,)})).render()
    assert "\x1b" not in shown_info
    assert "\x07" not in shown_info
    assert "\\x1b]0;owned\\x07" in shown_info
    error = CheckpointError.of(evil, f"is {evil}.")
    assert "\x1b" not in str(error)
    assert error.problems[0].path == evil
