"""What the manifest vouches for: itself, the checkpoint's place in the run, and its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from parallel_ckpt import CheckpointError, DamagedCheckpoint, newest_intact, read_start
from parallel_ckpt.formats.hashing import FileRecord
from parallel_ckpt.inspect import CheckpointInfo, inspect
from parallel_ckpt.store.manifest import (
    BaseModel,
    Manifest,
    OptimizerRecord,
    parse_manifest,
    signed_text,
)
from parallel_ckpt.verify import verify
from parallel_config import CheckpointFormat, Topology
from small_runs import ONE, change_document, change_manifest, save_two

SMALL = Manifest(
    step=3,
    samples_seen=24,
    sequence=2,
    topology=Topology(dp_shard=2),
    checkpoint_format=CheckpointFormat.DCP,
    files=(FileRecord(path="a/b", size_bytes=1, checksum="0" * 32),),
    created_at="2026-11-30T06:35:36+00:00",
    versions={"python": "3.11"},
    provenance={"rate": 0.5, "text": "\u00e4\U0001f600", "nothing": None, "on": True},
    optimizer=OptimizerRecord(class_name="torch.optim.adamw.AdamW"),
    base_model=BaseModel(source="user/name", revision=None, weights_hash="ab"),
    parent=1,
)


def test_every_flipped_bit_is_refused() -> None:
    text = SMALL.to_json().encode()
    assert parse_manifest(text, Path("m")) == SMALL
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpoint):
            parse_manifest(bytes(flipped), Path("m"))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + b"\n",
        lambda text: b" " + text,
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text.replace(b'"parent": 1', b'"parent":  1'),
        lambda text: text.replace(b"0.5", b"0.50"),
        lambda text: text.replace(b"\\u00e4", "\u00e4".encode()),
        lambda text: json.dumps(json.loads(text)).encode(),
        lambda text: text.replace(b'  "parent": 1,\n', b""),
        lambda text: text[:-3],
    ],
)
def test_the_same_values_in_other_bytes_are_refused(change: Any) -> None:
    text = SMALL.to_json().encode()
    assert change(text) != text
    with pytest.raises(DamagedCheckpoint):
        parse_manifest(change(text), Path("m"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": "torch.optim.SGD"}, "optimizer = .* must be null or name a class"),
        ({"optimizer": {"class": 3}}, "optimizer = .* must be null or name a class"),
        ({"optimizer": {"class": "a", "more": 1}}, "optimizer = .* must be null or name a class"),
        ({"base_model": {"source": "a"}}, "base_model = .* source, revision and weights_hash"),
        ({"parent": 2}, "parent = 2, but it must be null or below sequence"),
        ({"parent": True}, "parent = True, but it must be null or below sequence"),
        ({"topology": {"dp_replicate": 1, "dp_shard": 1}}, "must contain dp_replicate, .* and"),
        ({"format_version": 99}, "format_version = 99, but this parallel-ckpt reads up to 2"),
        ({"format_version": 1}, "is unknown to this format_version"),
    ],
)
def test_wrong_fields_are_named_although_the_checksum_fits(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(DamagedCheckpoint, match=words):
        parse_manifest(signed_text(json.loads(SMALL.to_json()) | fields), Path("m"))


def test_what_the_writer_remembers_is_hashed_as_it_is_read() -> None:
    provenance: Any = {"tuple": (1, 2), "key": {3: float("nan")}, "minus": -0.0}
    manifest = Manifest(
        step=1,
        samples_seen=0,
        sequence=1,
        topology=ONE,
        checkpoint_format=CheckpointFormat.DCP,
        files=(),
        provenance=provenance,
    )
    assert parse_manifest(manifest.to_json(), Path("m")).provenance["tuple"] == [1, 2]


@pytest.mark.parametrize("fast", [True, False])
def test_two_folders_that_were_swapped_do_not_verify(fast: bool, tmp_path: Path) -> None:
    checkpoints = save_two(tmp_path) / "checkpoints"
    for source, target in (("000001", "x"), ("000002", "000001"), ("x", "000002")):
        (checkpoints / source).rename(checkpoints / target)
    words = "000001 holds the checkpoint of step 2: the folder was renamed or swapped"
    assert any(
        words in str(problem) for problem in verify(checkpoints / "000001", fast=fast).problems
    )
    with pytest.raises(DamagedCheckpoint, match=words):
        read_start(checkpoints / "000001", topology=ONE, verify="fast" if fast else "full")
    assert newest_intact(tmp_path)[0] is None
    info = inspect(checkpoints / "000001")
    assert isinstance(info, CheckpointInfo)
    assert words in info.problems[0]


def test_a_checkpoint_that_was_copied_elsewhere_is_whole(tmp_path: Path) -> None:
    source = save_two(tmp_path / "run") / "checkpoints/000002"
    copied = shutil.copytree(source, tmp_path / "best")
    assert verify(copied).ok
    assert read_start(copied, topology=ONE).step == 2


@pytest.mark.parametrize(
    ("field", "value"), [("step", 7), ("samples_seen", 99), ("sequence", 0), ("sequence", 5)]
)
def test_a_manifest_that_the_step_contradicts_does_not_verify(
    field: str, value: int, tmp_path: Path
) -> None:
    """With a checksum that fits: another program wrote it."""
    path = shutil.copytree(save_two(tmp_path / "run") / "checkpoints/000002", tmp_path / "copy")
    change_manifest(path, **{field: value}, parent=None)
    words = rf"training_step.json: {field} = \d+, but manifest.json says {value}"
    with pytest.raises(CheckpointError, match=words):
        read_start(path, topology=ONE)
    assert not verify(path, fast=True).ok


def test_a_manifest_of_version_1_is_compared_with_its_step_too(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden/v1/good_single"
    path = shutil.copytree(golden, tmp_path / "copy")
    assert verify(path).ok
    change_manifest(path, samples_seen=8)
    words = "samples_seen = 3, but manifest.json says 8"
    assert words in str(verify(path).problems[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two(tmp_path_factory.mktemp("whole")) / "checkpoints/000002"


MANIFEST_SAYS = r"but manifest\.json says"
SEED = r"but it must be a whole number of 64 bits\."


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("step", "3", rf"= 3, {MANIFEST_SAYS} 2\."),
        ("step", "2.0", rf"= 2\.0, {MANIFEST_SAYS} 2\."),
        ("sequence", "[2]", rf"= \[2\], {MANIFEST_SAYS} 2\."),
        ("samples_seen", "NaN", rf"= nan, {MANIFEST_SAYS} 16\."),
        ("samples_seen", None, r"is missing\."),
        ("sequence", None, r"is missing\."),
        ("seed", None, r"is missing\."),
        ("seed", "null", rf"= None, {SEED}"),
        ("seed", "true", rf"= True, {SEED}"),
        ("seed", "1e3", rf"= 1000\.0, {SEED}"),
        ("seed", str(2**64), rf"= {2**64}, {SEED}"),
        ("seed", "9" * 400, rf"= an integer of 1329 bits, {SEED}"),
    ],
)
@pytest.mark.parametrize("check", ["full", "fast"])
def test_a_changed_step_document_is_named(
    check: Any, field: str, value: str | None, words: str, whole: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(whole, tmp_path / "copy")
    facts = json.loads((path / "training_state/training_step.json").read_bytes())
    facts = {k: json.dumps(v) for k, v in facts.items() if k != field}
    facts |= {} if value is None else {field: value}
    text = ", ".join(f'"{k}": {v}' for k, v in facts.items())
    file = change_document(path, "training_step.json", f"{{{text}}}".encode())
    with pytest.raises(DamagedCheckpoint, match=rf"{file}: {field} {words}"):
        read_start(path, topology=ONE, verify=check)
