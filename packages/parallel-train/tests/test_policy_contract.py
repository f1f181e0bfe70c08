"""What a policy from another package may look like, and the errors where it does not fit."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parallel_config import ConfigError, FSDPConfig
from parallel_engine.wrapping import resolve_wrap_policy
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.policies.answers import read_answer
from parallel_train.policies.base import PolicyConfig
from parallel_train.policies.factory import build_policy, policy_class
from parallel_train.policies.processors import Preprocessor
from parallel_train.policies.registry import POLICIES
from parallel_train.run.task import policy_loss

SPEC = DataSpec(
    10, {"observation.state": Feature("float32", (2,)), "action": Feature("float32", (1,))}
)


@dataclass(frozen=True, kw_only=True)
class StrangeConfig(PolicyConfig):
    """Names no model of its own."""

    width: int = 4


class Strange(nn.Module):
    config_class = StrangeConfig

    def __init__(self, config: StrangeConfig, spec: DataSpec) -> None:
        super().__init__()
        self.layer = nn.Linear(spec.dim("observation.state"), spec.dim("action"))

    def forward(self, batch: dict[str, Tensor]) -> Any:
        loss = self.layer(batch["observation.state"]).square().mean()
        return loss[None], {"loss": loss.item(), "chunk": torch.zeros(3), "note": "x", "n": 2}


class NoConfig(nn.Module):
    """A model without `config_class`."""


class TakesMore(nn.Module):
    config_class = StrangeConfig

    def __init__(self, config: StrangeConfig, spec: DataSpec, device: str) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def theirs() -> Iterator[None]:
    """A module of theirs that can be imported; what the registry remembers ends with the test."""
    module: Any = types.ModuleType("their_policies")
    for cls in (StrangeConfig, Strange, NoConfig, TakesMore):
        setattr(module, cls.__name__, cls)
    module.not_a_model = StrangeConfig  # an object that is no nn.Module
    sys.modules["their_policies"] = module
    yield
    del sys.modules["their_policies"]
    POLICIES._names.pop(StrangeConfig, None)


def named(name: str) -> PolicyConfig:
    return POLICIES.resolve(f"their_policies:{name}", trusted=True)()


def test_a_policy_may_be_named_by_its_model_class() -> None:
    config = named("Strange")
    assert isinstance(config, StrangeConfig)
    assert POLICIES.name_of(config) == "their_policies:Strange"
    assert policy_class(config) is Strange
    assert isinstance(build_policy(config, SPEC), Strange)


def test_loss_and_metrics_are_read_from_a_forward() -> None:
    model = build_policy(named("Strange"), SPEC)
    batch = {"observation.state": torch.ones(5, 2)}
    loss, metrics = policy_loss(model, batch, preprocessor=Preprocessor())
    assert loss.total.shape == ()
    assert loss.total.requires_grad
    assert loss.weight.item() == 5  # every sample counts alike
    assert set(metrics) == {"policy_loss", "n"}  # `loss` is what the run itself calls so
    assert metrics["n"].item() == 2
    assert all(isinstance(v, Tensor) and v.shape == () for v in metrics.values())


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (torch.tensor(1.0), []),
        ((torch.tensor(1.0), None), []),
        ((torch.tensor([1.0]), {"a": np.float64(1), "b": True, "c": np.zeros(3)}), ["a", "b"]),
        ((torch.tensor(1.0), {"a": torch.ones(1, requires_grad=True), "b": {"c": 1}}), ["a"]),
    ],
)
def test_answers_that_are_understood(answer: Any, names: list[str]) -> None:
    loss, metrics = read_answer(answer, "Theirs")
    assert loss.shape == ()
    assert sorted(metrics) == names
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"Theirs.forward\(batch\) returned a NoneType, but it returns \(loss, metrics\)"),
        ({"loss": torch.ones(())}, r"returned a dict, but"),
        ((torch.ones(4), {}), r"returned \(a tensor of shape \[4\], a dict\), but"),
        ((torch.ones(()), {}, 1), r"returned \(a tensor of shape \[\], a dict, a int\), but"),
        ((torch.ones(()), [1.0]), r"returned a list beside the loss, but metrics are a dict"),
    ],
)
def test_answers_that_are_refused(answer: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_answer(answer, "Theirs")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", r"'their_policies:Missing' cannot be imported: .*no attribute 'Missing'"),
        (
            "NoConfig",
            r"'their_policies:NoConfig' is not a PolicyConfig.*or a class whose config_cl",
        ),
    ],
)
def test_paths_that_do_not_lead_to_a_policy_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named(name)


def test_a_module_that_does_not_import_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be imported: No module named 'nowhere'.*path"):
        POLICIES.resolve("nowhere.at_all:Policy", trusted=True)


def test_a_config_without_a_model_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"StrangeConfig.model_class = '' does not name a model.*name"
    ):
        build_policy(named("StrangeConfig"), SPEC)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:Model", r"model_class = 'nowhere:Model' cannot be imported: No module named"),
        ("their_policies:Gone", r"model_class = 'their_policies:Gone' cannot be imported"),
        ("their_policies", r"model_class = 'their_policies' does not name a class"),
        ("their_policies:not_a_model", r"is not a class derived from torch.nn.Module"),
    ],
)
def test_a_model_class_that_leads_nowhere_is_refused(
    path: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StrangeConfig, "model_class", path)
    if path.endswith("not_a_model"):
        monkeypatch.setattr(sys.modules["their_policies"], "not_a_model", PolicyConfig)
    with pytest.raises(ConfigError, match=message):
        build_policy(named("StrangeConfig"), SPEC)


def test_a_constructor_that_takes_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TakesMore\(config, spec\): missing .*'device'"):
        build_policy(named("TakesMore"), SPEC)


def test_without_wrap_units_a_sharded_run_is_refused() -> None:
    model = build_policy(named("Strange"), SPEC)
    with pytest.raises(ConfigError, match=r"Strange does not declare _fsdp_wrap_modules.*Linear"):
        resolve_wrap_policy(model, FSDPConfig())
