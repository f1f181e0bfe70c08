"""A checkpoint that does not fit, or is damaged, is refused before anything is changed."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as S

from parallel_ckpt import (
    CheckpointError,
    CheckpointNotFound,
    DamagedCheckpoint,
    StateMismatch,
    load_weights,
    restore,
    save_weights,
)
from parallel_ckpt.state.schedule import require_schedule
from small_runs import change_document, save_two, saver_of, small, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two(tmp_path_factory.mktemp("runs") / "optimizer_sweep" / "run 1 [ü]")


def test_strict_on_names_shapes_and_dtypes(run: Path) -> None:
    bigger = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    before = [p.clone() for p in bigger.parameters()]
    with pytest.raises(StateMismatch) as caught:
        restore(run, bigger)
    lines = str(caught.value).splitlines()
    assert "weights: 0.weight has shape (5, 3), but (4, 3) is stored." in lines
    assert "weights: 2.bias is missing in the checkpoint." in lines
    assert all(torch.equal(a, b) for a, b in zip(before, bigger.parameters(), strict=True))
    with pytest.raises(StateMismatch, match=r"1\.bias is in the checkpoint, but not in"):
        restore(run, nn.Sequential(nn.Linear(3, 4)))
    half = small()[0].to(torch.bfloat16)
    with pytest.raises(StateMismatch, match=r"would lose precision of the stored torch\.float32"):
        restore(run, half)
    load_weights(half, run, allow_cast=True)
    restore(run, small()[0].double())


def test_strict_on_optimizer_groups(run: Path) -> None:
    model, _ = small()
    part = torch.optim.AdamW(model[0].parameters())
    with pytest.raises(StateMismatch, match=r"optimizer: 1\.bias was optimized when it was saved"):
        restore(run, model, part)
    stray = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(StateMismatch, match=r"holds a parameter of shape \(7,\)"):
        restore(run, model, stray)


def test_groups_of_other_rates_cannot_be_joined(tmp_path: Path) -> None:
    model, _ = small()
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    with saver_of(tmp_path) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    with pytest.raises(StateMismatch, match=r"joins the saved groups \[0, 1\]"):
        restore(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5))


def schedules(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    lambdas = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer)
    return {
        "none": None,
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        "lambda": lambdas,
        "sequence": torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, lambdas], [3]),
        "longer": torch.optim.lr_scheduler.ChainedScheduler([warmup, warmup, lambdas]),
    }


@pytest.mark.parametrize(
    ("saved", "given", "words"),
    [
        ("none", "cosine", "scheduler was not saved in this checkpoint."),
        ("cosine", "lambda", "scheduler of another kind was saved: lr_lambdas is missing in it."),
        (
            "lambda",
            "sequence",
            "scheduler of another kind was saved: _schedulers is missing in it.",
        ),
        ("sequence", "longer", "scheduler has 3 parts, but 2 were saved."),
    ],
)
def test_a_scheduler_that_does_not_fit_is_told_before_anything_is_changed(
    saved: str, given: str, words: str, tmp_path: Path
) -> None:
    model, optimizer = small()
    train(model, optimizer)
    with saver_of(tmp_path) as saver:
        scheduler = schedules(optimizer)[saved]
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer, scheduler=scheduler)
    other, target = small(lr=0.7)
    scheduler = schedules(target)[given]
    before = [p.clone() for p in other.parameters()]
    rate = target.param_groups[0]["lr"]
    with pytest.raises(StateMismatch) as caught:
        restore(tmp_path, other, target, scheduler)
    assert str(caught.value) == words
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert not target.state
    assert target.param_groups[0]["lr"] == rate


@pytest.mark.parametrize("verify", ["full", "fast", None])
def test_damage_is_found_where_it_is_looked_for(verify: Any, tmp_path: Path) -> None:
    model, optimizer = small()
    with saver_of(tmp_path) as saver:
        path = saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    file = path / "pretrained_model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x40
    file.write_bytes(content)
    calls: list[Any] = [
        lambda: restore(path, model, optimizer, verify=verify),
        lambda: load_weights(model, path, verify=verify),
        lambda: load_weights(model, file, verify=verify),
    ]
    before = [p.clone() for p in model.parameters()]
    for call in calls:
        told = pytest.raises(DamagedCheckpoint, match=r"model\.safetensors has checksum")
        with told if verify == "full" else contextlib.nullcontext():
            call()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same is (verify == "full")
    save_weights(model, tmp_path / "exported")
    load_weights(model, tmp_path / "exported")
    with pytest.raises(CheckpointNotFound):
        load_weights(model, tmp_path / "exported", verify="full")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("last_epoch", 1.5, "a whole number from -1 to 4611686018427387903"),
        ("last_epoch", -2, "a whole number from -1 to 4611686018427387903"),
        ("_step_count", 2**63, "a whole number from -1 to 4611686018427387903"),
        ("eta_min", "small", "a number"),
        ("eta_min", float("nan"), "a number"),
        ("T_max", 10**400, "a number"),
        ("base_lrs", [0.1, 0.1], "1 numbers"),
        ("base_lrs", [True], "1 numbers"),
        ("_last_lr", 0.1, "1 numbers"),
        ("_last_lr", {}, "1 numbers"),
        ("base_lrs", None, "1 numbers"),
        ("T_max", None, "a number"),
        ("_is_initial", None, "true or false"),
    ],
)
def test_numbers_that_a_scheduler_cannot_have(key: str, value: Any, wanted: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    own = scheduler.state_dict()
    require_schedule(own, scheduler, "s.json")
    with pytest.raises(StateMismatch, match=rf"scheduler\.{key} = .* it must be {wanted}\."):
        require_schedule({**own, key: value}, scheduler, "s.json")


def test_infinite_numbers_and_tensors_are_numbers() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    own = scheduler.state_dict()
    assert own["best"] == float("inf")
    require_schedule({**own, "best": torch.tensor(0.5)}, scheduler, "s.json")


class Own(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """A scheduler of a user's, which fills in later what it is built without."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return found | {"history": vars(self).get("history", []), "seen": vars(self).get("seen")}


NESTED: dict[str, Any] = {
    "lambda": lambda o: S.LambdaLR(o, lambda k: 1.0),
    "steps": lambda o: S.MultiStepLR(o, [1, 3]),
    "no steps": lambda o: S.MultiStepLR(o, []),
    "sequence": lambda o: S.SequentialLR(o, [S.ConstantLR(o), S.ConstantLR(o)], [2]),
    "one": lambda o: S.SequentialLR(o, [S.ConstantLR(o)], []),
    "own": lambda o: Own(o),
}


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("lambda", "lr_lambdas", [], r"\.lr_lambdas = \[\] .* must be a list of 1\."),
        ("lambda", "lr_lambdas", {}, r"\.lr_lambdas = {} .* must be a list\."),
        ("lambda", "lr_lambdas", [7], r"\.lr_lambdas\[0\] = 7 .* must be null or a dict\."),
        ("steps", "milestones", {1: 1}, r"\.milestones = .* must be a Counter\."),
        (
            "steps",
            "milestones",
            Counter({"x": 1}),
            r"\.milestones = .* must be a dict of numbers\.",
        ),
        ("no steps", "milestones", None, r"\.milestones = None .* must be a Counter\."),
        ("one", "_milestones", [3], r"\._milestones = \[3\] .* must be a list of 0\."),
        ("one", "_milestones", None, r"\._milestones = None .* must be a list\."),
        (
            "sequence",
            "_schedulers",
            [{}, {}],
            r"\._schedulers\[0\] = {} .* a dict with last_epoch\.",
        ),
        ("sequence", "_schedulers", 5, r"\._schedulers = 5 .* must be a list\."),
        ("own", "mode_worse", None, r"\.mode_worse = None .* must be a number\."),
    ],
)
def test_what_lies_in_a_schedulers_lists_and_dicts_is_compared(
    name: str, key: str, value: Any, words: str
) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = NESTED[name](optimizer)
    stored = scheduler.state_dict()
    require_schedule(stored, scheduler, "scheduler.json")
    with pytest.raises(StateMismatch, match=rf"scheduler{words}") as caught:
        require_schedule({**stored, key: value}, scheduler, "scheduler.json")
    assert "was saved in scheduler.json" in str(caught.value)


def test_a_scheduler_of_the_user_may_fill_what_it_built_empty() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = Own(optimizer)
    stored = scheduler.state_dict() | {"history": [0.5, 0.25], "seen": 3}
    require_schedule(stored, scheduler, "scheduler.json")
    del stored["last_epoch"]
    with pytest.raises(StateMismatch, match=r"^scheduler = .* must be a dict with last_epoch\."):
        require_schedule(stored, scheduler, "scheduler.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: [], r"optimizer\.json: groups is missing, or has another form"),
        (lambda index: index | {"state": []}, r"optimizer\.json: state is missing"),
        (lambda index: index | {"groups": [{}]}, r"optimizer\.json: groups\[0\] is missing"),
        (
            lambda index: index | {"state": {"0.weight": {"tensors": 1}}},
            r"optimizer\.json: state\.0\.weight is missing",
        ),
        (lambda index: with_hyper(index, lr="high"), r"\[0\]\.lr = 'high' was saved, .* a number"),
        (lambda index: with_hyper(index, betas=[0.9]), r"\.betas = \[0\.9\] .* 2 numbers"),
        (lambda index: with_hyper(index, amsgrad=None), r"\.amsgrad = None .* true or false"),
    ],
)
def test_a_damaged_description_of_the_optimizer_changes_nothing(
    change: Any, words: str, run: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(run / "checkpoints/000002", tmp_path / "copy")
    index = json.loads((path / "training_state/optimizer.json").read_bytes())
    change_document(path, "optimizer.json", json.dumps(change(index)).encode())
    model, optimizer = small()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=words):
        restore(path, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state


def with_hyper(index: Any, **hyper: Any) -> Any:
    index["groups"][0]["hyper"] |= hyper
    return index
