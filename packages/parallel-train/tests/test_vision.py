"""The ResNet behind the cameras: random at first, pretrained on request, clear when missing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_config import ConfigError
from parallel_engine import initialize, parameters_on_meta
from parallel_engine.materialize import allocate
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.act.modeling import ACTPolicy
from parallel_train.policies.factory import build_policy, load_pretrained
from parallel_train.policies.vision import ImageTokens, place_codes

torchvision = pytest.importorskip("torchvision", reason="needs the extra vision")

TOP = "observation.images.top"
SPEC = DataSpec(
    10,
    {
        "observation.state": Feature("float32", (4,)),
        TOP: Feature("video", (64, 64, 3)),
        "action": Feature("float32", (2,)),
    },
)
NAME = "IMAGENET1K_V1"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of torch's, and a network that refuses every connection."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for scheme in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(scheme, "http://127.0.0.1:9")
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def published(downloads: Path) -> dict[str, torch.Tensor]:
    """A file in the cache with the name and the keys of the published weights."""
    torch.manual_seed(3)
    theirs = torchvision.models.resnet18()
    for norm in theirs.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    url = torchvision.models.get_model_weights("resnet18")[NAME].url
    torch.save(theirs.state_dict(), downloads / url.rpartition("/")[2])
    return dict(theirs.state_dict())


def config(**changes: Any) -> ACTConfig:
    return ACTConfig(cameras=(TOP,), dim_model=32, dim_feedforward=64, chunk_size=4, **changes)


def test_nothing_is_fetched_by_default(downloads: Path) -> None:
    assert ACTConfig().vision_weights is None
    model = build_policy(config(), SPEC)
    load_pretrained(model)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in model.modules())


def test_pretrained_weights_are_loaded_and_their_norms_frozen(downloads: Path) -> None:
    theirs = published(downloads)
    torch.manual_seed(0)
    model: Any = build_policy(config(vision_weights=NAME), SPEC)
    first = model.image.features.conv1.weight
    assert not torch.equal(first, theirs["conv1.weight"])  # nothing is fetched while building
    load_pretrained(model)
    assert torch.equal(first, theirs["conv1.weight"])
    reference = torchvision.models.resnet18().eval()
    reference.load_state_dict(theirs)
    without_head = nn.Sequential(*list(reference.children())[:-2])
    images = torch.randn(2, 3, 64, 64)
    found = model.train().image.features(images)  # also in training: batches change nothing
    torch.testing.assert_close(found, without_head(images))
    trainable = {name for name, _ in model.image.features.named_parameters()}
    assert not any("bn" in name for name in trainable)


def test_frozen_norms_stand_between_narrow_weights() -> None:
    tokens = ImageTokens("resnet18", NAME, 32, 1)
    for parameter in tokens.parameters():  # as sharding in bf16 does; buffers stay fp32
        parameter.data = parameter.data.bfloat16()
    found, positions = tokens(torch.randn(1, 3, 64, 64, dtype=torch.bfloat16), 0)
    assert found.dtype == positions.dtype == torch.bfloat16
    assert found.shape == (1, 4, 32)


def test_weights_that_cannot_be_fetched_are_one_clear_error(downloads: Path) -> None:
    model = build_policy(config(vision_weights=NAME), SPEC)
    with pytest.raises(ConfigError, match=r"policy.vision_weights = 'IMAGENET1K_V1'.*fetched"):
        load_pretrained(model)


def test_unknown_weights_are_refused_before_anything_is_fetched() -> None:
    with pytest.raises(
        ConfigError, match=r"= 'V9': resnet18 does not have such weights.*IMAGENET1K_V1"
    ):
        build_policy(config(vision_weights="V9"), SPEC)


def test_without_torchvision_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError) as caught:
        build_policy(config(), SPEC)
    assert "policy.cameras: pictures are read by torchvision's ResNet" in str(caught.value)
    assert 'pip install "parallel-train[vision]"' in str(caught.value)
    assert isinstance(build_policy(ACTConfig(), SPEC), ACTPolicy)  # without cameras none is needed


def test_the_backbone_is_cut_into_units_of_its_own() -> None:
    model: Any = build_policy(config(), SPEC)
    classes = {type(part).__name__ for part in model.modules()}
    assert "BasicBlock" in model._fsdp_wrap_modules
    assert set(model._fsdp_wrap_modules) <= classes
    assert "BasicBlock" not in ACTPolicy(ACTConfig(), SPEC)._fsdp_wrap_modules


def test_a_camera_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names 'front', which the dataset does not have.*top"):
        ACTPolicy(ACTConfig(cameras=("front",)), SPEC)


def test_drawn_on_meta_or_in_memory_the_values_are_the_same():
    torch.manual_seed(5)
    wanted = ImageTokens("resnet18", None, 16, 2).state_dict()
    with parameters_on_meta():
        tokens = ImageTokens("resnet18", None, 16, 2)
    allocate(tokens, torch.device("cpu"))
    torch.manual_seed(5)
    initialize(tokens)
    found = tokens.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    first = found["features.conv1.weight"]
    assert first.std() == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.02)


@pytest.mark.parametrize("dim", [2, 6, 7, 8])
def test_codes_of_places_have_any_width(dim: int) -> None:
    codes = place_codes(3, 5, dim)
    assert codes.shape == (15, dim)
    half = dim // 2
    by_place = codes.reshape(3, 5, dim)
    assert torch.equal(by_place[:, 0, :half], by_place[:, 4, :half])
    assert torch.equal(by_place[0, :, half:], by_place[2, :, half:])
    assert len(codes.unique(dim=0)) == 15


def test_a_policy_whose_even_width_is_not_a_multiple_of_four_sees() -> None:
    changed = config(use_vae=False, n_heads=1)
    model: Any = build_policy(dataclasses.replace(changed, dim_model=30), SPEC)
    batch = {"observation.state": torch.zeros(1, 4), TOP: torch.zeros(1, 3, 64, 64)}
    assert model.predict_action_chunk(batch).shape == (1, 4, 2)


class _HostTensors(TorchDispatchMode):
    """Collects the operators that make a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.found.append(str(func))
        return result


def test_a_forward_makes_its_positions_on_the_device_of_the_picture():
    """The meta device stands for a GPU: a copy from the host would show as a tensor of the CPU."""
    tokens = ImageTokens("resnet18", None, 16, 2).to("meta")
    with _HostTensors() as seen:
        tokens(torch.empty(1, 3, 64, 64, device="meta"), 0)
    assert seen.found == []
