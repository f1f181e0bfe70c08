"""An optimizer goes on only with the state of its own class, unless it is asked to start anew."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from parallel_ckpt import StateMismatch, restore
from parallel_ckpt.state.optimizer import class_of, is_same_class
from small_runs import saver_of, train

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.SGD,
    )
}


class Own(torch.optim.AdamW):
    """A class of a user's, with the state of another."""


def built(kind: Any, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return model, kind(model.parameters(), lr=lr, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, kind in KINDS.items():
        root = tmp_path_factory.mktemp(name)
        model, optimizer = built(kind)
        train(model, optimizer)
        with saver_of(root) as saver:
            found[name] = saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    return found


@pytest.mark.parametrize(("saved", "now"), list(itertools.permutations(KINDS, 2)))
def test_every_pair_is_refused_by_name_and_changes_nothing(
    saved: str, now: str, runs: dict[str, Path]
) -> None:
    model, optimizer = built(KINDS[now])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    words = (
        rf"is torch\.optim\.\w+\.{now}, but the checkpoint holds .* torch\.optim\.\w+\.{saved}\."
    )
    with pytest.raises(StateMismatch, match=words):
        restore(runs[saved], model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert len(optimizer.state) == (4 if now == "Adagrad" else 0)  # which begins with some


@pytest.mark.parametrize("name", KINDS)
def test_the_same_class_goes_on(name: str, runs: dict[str, Path]) -> None:
    model, optimizer = built(KINDS[name])
    restored = restore(runs[name], model, optimizer, allow_optimizer_change=True)
    assert not restored.starts_anew
    assert not restored.notes
    assert restored.num_optimizer_entries
    train(model, optimizer)


def test_a_change_that_was_asked_for_starts_the_state_anew(runs: dict[str, Path]) -> None:
    model, optimizer = built(torch.optim.SGD, lr=0.7)
    restored = restore(runs["AdamW"], model, optimizer, allow_optimizer_change=True)
    assert restored.starts_anew
    assert restored.notes == (
        "optimizer: torch.optim.adamw.AdamW -> torch.optim.sgd.SGD, whose state starts anew.",
    )
    assert not optimizer.state
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.7, 0.9, 0)
    assert "betas" not in group
    train(model, optimizer)


@pytest.mark.parametrize("name", KINDS)
def test_each_class_can_start_anew(name: str, runs: dict[str, Path]) -> None:
    """Adagrad cannot begin with an empty state."""
    model, optimizer = built(KINDS[name])
    other = "SGD" if name != "SGD" else "Adam"
    assert restore(runs[other], model, optimizer, allow_optimizer_change=True).starts_anew
    train(model, optimizer)
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("name", KINDS)
def test_an_optimizer_that_has_stepped_starts_as_one_that_was_just_built(
    name: str, runs: dict[str, Path]
) -> None:
    other = runs["SGD" if name != "SGD" else "Adam"]
    pairs = [built(KINDS[name]) for _ in range(2)]
    train(*pairs[0], steps=3)
    for model, optimizer in pairs:
        restore(other, model, optimizer, allow_optimizer_change=True)
        train(model, optimizer)
    (model, optimizer), (fresh, of_fresh) = pairs
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))
    assert str(optimizer.state_dict()) == str(of_fresh.state_dict())


def test_adagrad_begins_with_its_own_sum(runs: dict[str, Path]) -> None:
    model, _ = built(torch.optim.SGD)
    groups = [{"params": [p], "lr": 0.1} for p in model.parameters()]
    optimizer = torch.optim.Adagrad(groups, initial_accumulator_value=0.5)
    train(model, optimizer)
    restore(runs["SGD"], model, optimizer, allow_optimizer_change=True)
    assert [float(s["sum"].mean()) for s in optimizer.state.values()] == [0.5] * 4
    assert [float(s["step"]) for s in optimizer.state.values()] == [0.0] * 4


class Demanding(torch.optim.SGD):
    """Cannot be built from its groups alone."""

    def __init__(self, params: Any, total: int) -> None:
        super().__init__(params, lr=0.1 / total, momentum=0.9)


def test_a_state_that_cannot_start_anew_is_refused_before_anything_is_changed(
    runs: dict[str, Path],
) -> None:
    model, _ = built(torch.optim.SGD)
    optimizer = Demanding(model.parameters(), 5)
    train(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    words = r"has state, but a new .*Demanding cannot be built from its groups \(TypeError: .*total"
    with pytest.raises(StateMismatch, match=words):
        restore(runs["AdamW"], model, optimizer, allow_optimizer_change=True)
    assert all(map(torch.equal, before, model.parameters()))
    assert len(optimizer.state) == 4
    optimizer.state.clear()
    assert restore(runs["AdamW"], model, optimizer, allow_optimizer_change=True).starts_anew


def test_a_subclass_is_another_class(runs: dict[str, Path]) -> None:
    model, optimizer = built(Own)
    with pytest.raises(StateMismatch, match=r"is .*Own, but .* torch\.optim\.adamw\.AdamW"):
        restore(runs["AdamW"], model, optimizer)


def test_a_scripts_own_class_counts_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = built(Own)
    as_module = class_of(optimizer)
    monkeypatch.setattr(Own, "__module__", "__main__")
    assert class_of(optimizer) == "Own"
    assert is_same_class(as_module, "Own")
    assert not is_same_class("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
    assert not is_same_class("torch.optim.adam.Adam", "other.Adam")


@pytest.mark.parametrize("kind", ["lambda", "step"])
def test_the_place_on_the_schedule_is_kept(kind: str, tmp_path: Path) -> None:
    def schedule(optimizer: Any) -> Any:
        if kind == "step":
            return StepLR(optimizer, step_size=2, gamma=0.5)
        return LambdaLR(optimizer, lambda step: 0.5 ** (step // 2))

    model, optimizer = built(torch.optim.AdamW)
    scheduler = schedule(optimizer)
    for _ in range(3):
        train(model, optimizer)
        scheduler.step()
    with saver_of(tmp_path) as saver:
        path = saver.save(
            step=3, samples_seen=0, model=model, optimizer=optimizer, scheduler=scheduler
        )
    model, optimizer = built(torch.optim.SGD, lr=0.8)
    scheduler = schedule(optimizer)
    restore(path, model, optimizer, scheduler, allow_optimizer_change=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    train(model, optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_version_1_does_not_name_the_class() -> None:
    golden = Path(__file__).parent / "golden/v1/good_single"
    model = nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert restore(golden, model, optimizer).num_optimizer_entries == 2
    restored = restore(golden, model, optimizer, allow_optimizer_change=True)
    assert restored.notes == (
        "optimizer: the state of torch.optim.sgd.SGD starts anew, as requested.",
    )


def test_gradients_of_other_weights_are_dropped(runs: dict[str, Path]) -> None:
    model, optimizer = built(torch.optim.AdamW)
    model(torch.ones(1, 3)).sum().backward()
    restored = restore(runs["AdamW"], model, optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert restored.notes == (
        "gradients of 4 parameters are dropped: they do not belong to the restored weights.",
    )
    fresh, same = built(torch.optim.AdamW)
    restore(runs["AdamW"], fresh, same)
    for pair in ((model, optimizer), (fresh, same)):
        train(*pair)
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))
