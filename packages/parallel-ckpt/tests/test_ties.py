"""What a restore must not do in silence: drop a tied tensor's other values, or fill nothing."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from parallel_ckpt import CheckpointSaver, StateMismatch, load_weights, restore
from parallel_config import CheckpointFormat, Topology


class Tied(nn.Module):
    def __init__(self, *, tied: bool, heads: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 4, bias=False) for _ in range(heads))
        if tied:
            for head in self.heads:
                head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("head", "is_refused"),
    [
        (lambda w: w.clone(), False),
        (lambda w: w + 1, True),
        (lambda w: torch.where(w == w[3, 2], w.nextafter(w + 1), w), True),
        (lambda w: w.bfloat16(), True),
        (lambda w: w[:2].clone(), True),
        (lambda w: torch.full_like(w, -0.0), True),
    ],
    ids=["same", "other", "one element", "dtype", "shape", "sign of zero"],
)
def test_an_untied_tensor_is_taken_only_if_nothing_is_lost(  # type: ignore[no-untyped-def]
    head, is_refused: bool, tmp_path: Path
) -> None:
    weight = torch.arange(12.0).reshape(4, 3) if head(torch.ones(4, 3)).any() else torch.zeros(4, 3)
    save_file(
        {"embed.weight": weight, "heads.0.weight": head(weight)}, tmp_path / "model.safetensors"
    )
    model = Tied(tied=True)
    before = model.embed.weight.detach().clone()
    if not is_refused:
        load_weights(model, tmp_path)
        assert torch.equal(model.embed.weight, weight)
        return
    with pytest.raises(
        StateMismatch,
        match=r"weights: heads\.0\.weight is tied to embed\.weight in the model, but other values "
        r"are stored for it than for embed\.weight",
    ):
        load_weights(model, tmp_path)
    assert torch.equal(model.embed.weight, before)


def test_nan_equals_itself_in_a_tied_tensor(tmp_path: Path) -> None:
    weight = torch.full((4, 3), struct.unpack("<f", b"\x01\x00\xc0\x7f")[0])
    tensors = {"embed.weight": weight, "heads.0.weight": weight.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(Tied(tied=True), tmp_path)


@pytest.mark.parametrize("stored", [("heads.1.weight",), ("heads.0.weight", "heads.1.weight")])
def test_further_names_are_compared_when_the_first_is_missing(
    stored: tuple[str, ...], tmp_path: Path
) -> None:
    tensors = {name: torch.full((4, 3), float(i)) for i, name in enumerate(stored)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Tied(tied=True, heads=2)
    if len(stored) == 1:
        load_weights(model, tmp_path)
        assert not model.embed.weight.any()
        return
    with pytest.raises(StateMismatch, match=r"heads\.1\.weight is tied to embed\.weight"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_an_untied_checkpoint_of_ours_is_refused_too(form: str, tmp_path: Path) -> None:
    with CheckpointSaver(
        tmp_path, topology=Topology(), checkpoint_format=CheckpointFormat(form)
    ) as saver:
        path = saver.save(step=1, samples_seen=1, model=Tied(tied=False))
    for load in (lambda m: restore(path, m), lambda m: load_weights(m, path)):
        with pytest.raises(StateMismatch, match=r"is tied to embed\.weight in the model"):
            load(Tied(tied=True))
    restore(path, Tied(tied=False))


def test_a_model_on_meta_is_not_filled_in_silence(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, topology=Topology()) as saver:
        path = saver.save(step=1, samples_seen=1, model=nn.Linear(2, 2))
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    half = nn.Linear(2, 2)
    half.bias = model.bias
    for found in (model, half):
        for load in (lambda m: restore(path, m), lambda m: load_weights(m, path)):
            with pytest.raises(StateMismatch, match="weights: bias is on meta, where it does not"):
                load(found)
    restore(path, model.to_empty(device="cpu"))
