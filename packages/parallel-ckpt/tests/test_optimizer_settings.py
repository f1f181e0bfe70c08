"""Which settings of an optimizer come from the checkpoint, and which stay its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_ckpt import (
    restore,
)
from parallel_ckpt.state.optimizer import EXECUTION
from small_runs import saver_of, small, train


def test_overrides_win_and_keep_the_place_on_the_curve(tmp_path: Path) -> None:
    def build(lr: float, horizon: int) -> Any:
        model, optimizer = small(lr=lr, weight_decay=lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / horizon)
        return model, optimizer, schedule

    model, optimizer, schedule = build(0.1, 10)
    for _ in range(5):
        train(model, optimizer)
        schedule.step()
    with saver_of(tmp_path) as saver:
        saver.save(step=5, samples_seen=0, model=model, optimizer=optimizer, scheduler=schedule)
    for keep, lr, decay, next_lr in (
        ((), 0.05, 0.1, 0.04),
        (("lr", "weight_decay"), 0.1, 0.2, 0.08),
    ):
        model, optimizer, schedule = build(0.2, 10)
        restore(tmp_path, model, optimizer, schedule, keep=keep)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
        assert optimizer.param_groups[0]["weight_decay"] == decay
        train(model, optimizer)
        schedule.step()
        assert schedule.get_last_lr() == pytest.approx([next_lr])
    model, optimizer, schedule = build(0.1, 20)
    restore(tmp_path, model, optimizer, schedule, keep=("schedule",))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.75)


COMPUTING: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]


@pytest.mark.parametrize("resumed", COMPUTING)
@pytest.mark.parametrize("saved", COMPUTING)
def test_how_an_optimizer_computes_is_its_own(
    saved: dict[str, Any], resumed: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, _ = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **saved)
    train(model, optimizer, 2)
    with saver_of(tmp_path) as saver:
        saver.save(step=2, samples_seen=0, model=model, optimizer=optimizer)
    train(model, optimizer)
    other, _ = small()
    target = torch.optim.AdamW(other.parameters(), lr=0.5, **resumed)
    own = {key: target.param_groups[0][key] for key in EXECUTION}
    restore(tmp_path, other, target)
    assert {key: target.param_groups[0][key] for key in EXECUTION} == own
    assert target.param_groups[0]["lr"] == 0.1
    train(other, target)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert target.state[other[0].weight]["step"].dtype == torch.float32


def test_groups_that_only_compute_differently_may_be_joined(tmp_path: Path) -> None:
    model, _ = small()
    groups = [
        {"params": model[0].parameters(), "foreach": True},
        {"params": model[1].parameters(), "foreach": False},
    ]
    with saver_of(tmp_path) as saver:
        optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
        train(model, optimizer)
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    restore(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


def test_a_fused_step_counts_in_float32_whatever_was_saved(tmp_path: Path) -> None:
    """Torch counts in its default dtype, except where the kernel counts."""
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer = small()
        train(model.float(), optimizer, 0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[model[0].weight]["step"].dtype == torch.float64
    with saver_of(tmp_path) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    other, _ = small()
    for fused, dtype in ((True, torch.float32), (False, torch.float64)):
        target = torch.optim.AdamW(other.parameters(), fused=fused)
        restore(tmp_path, other, target)
        assert target.state[other[0].weight]["step"].dtype == dtype
        train(other, target)
        assert float(target.state[other[0].weight]["step"]) == 2


@pytest.mark.parametrize(("saved", "given"), [(0.25, torch.tensor(0.5)), (torch.tensor(0.25), 0.5)])
def test_a_rate_stays_the_number_or_the_tensor_that_it_is(
    saved: Any, given: Any, tmp_path: Path
) -> None:
    model, optimizer = small(lr=saved)
    with saver_of(tmp_path) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    other, target = small(lr=given)
    restore(tmp_path, other, target)
    found = target.param_groups[0]["lr"]
    assert type(found) is type(given)
    assert float(found) == 0.25
