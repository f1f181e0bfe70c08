"""Checkpoints of each format_version, good and damaged, as they were committed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from parallel_ckpt import (
    CheckpointError,
    DamagedCheckpoint,
    read_start,
    resolve_checkpoint,
    restore,
)
from parallel_ckpt.store.manifest import OptimizerRecord, parse_manifest
from parallel_config import Topology

ALL = Path(__file__).parent / "golden"
GOLDEN = ALL / "v1"
EXAMPLE = Path(__file__).parents[3] / "examples" / "04_save_and_resume.py"


@pytest.mark.parametrize("kind", ["v1/good_single", "v1/good_fsdp2", "v2/good_single"])
def test_good_ones_load(kind: str) -> None:
    start = read_start(ALL / kind, topology=Topology())
    assert (start.step, start.samples_seen, start.data_state) == (3, 3, 3.0)
    assert start.manifest.topology.world_size == (2 if kind.endswith("fsdp2") else 1)
    model = torch.nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.1)
    restored = restore(start.path, model, optimizer)
    start.restore_rng()
    assert restored.num_optimizer_entries == 2
    assert optimizer.param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 3.0))
        moment = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(moment, torch.full_like(parameter, 3.0))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("flipped_optimizer", r"optimizer/__0_0\.distcp has checksum \w+; \w+ was committed"),
        ("truncated_weights", r"model\.safetensors has \d+ bytes; \d+ were committed"),
        ("missing_rng", r"rank_00000\.safetensors is missing"),
        ("manifest_leads_out", r"files\[\d+\]\.path = .* must stay in the checkpoint"),
        ("uncommitted", r"is not a checkpoint"),
        ("later_version", r"format_version = 99, but this parallel-ckpt reads up to 2"),
    ],
)
def test_damaged_ones_are_refused_by_name(damage: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_start(GOLDEN / f"damaged_{damage}", topology=Topology())


def test_version_2_names_the_optimizer_and_vouches_for_itself() -> None:
    manifest = read_start(ALL / "v2/good_single", topology=Topology()).manifest
    assert manifest.format_version == 2
    assert manifest.optimizer == OptimizerRecord(class_name="torch.optim.sgd.SGD")
    assert (manifest.ring_degree, manifest.ulysses_degree, manifest.base_model) == (1, 1, None)
    with pytest.raises(DamagedCheckpoint, match=r"its manifest_checksum is \w+: it was changed"):
        read_start(ALL / "v2/damaged_manifest", topology=Topology())


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_manifest_that_is_read_is_written_as_it_was(version: str) -> None:
    """A conversion in place writes the manifest anew, and must not claim what is not known."""
    text = (ALL / version / "good_single/manifest.json").read_bytes()
    assert parse_manifest(text, GOLDEN).to_json().encode() == text


def test_the_example_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not EXAMPLE.is_file():
        pytest.skip("examples are not part of the built package")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path)])
    for begin in (0, 3):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert f"begins at step {begin}\n" in capsys.readouterr().out
    assert resolve_checkpoint(tmp_path).name == "000006"
