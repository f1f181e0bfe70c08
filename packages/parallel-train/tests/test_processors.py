"""Normalization: to the right numbers, back again, and unharmed by constants and by saving."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel_config import ConfigError
from parallel_train.data.stats import Stats
from parallel_train.policies.processors import Postprocessor, Preprocessor

GENERATOR = np.random.default_rng(0)
FRAMES = (GENERATOR.normal(size=(500, 4)) * [3, 0.01, 1, 1] + [100, -2, 0, 0]).astype(np.float32)
FRAMES[:, 2] = 0.1  # constant
FRAMES[:, 3] = 0.3 + np.float32(3e-8) * GENERATOR.integers(0, 2, 500)  # constant but for rounding
ACTIONS = GENERATOR.uniform(-2, 5, size=(500, 3)).astype(np.float32)
STATS = {"observation.state": Stats.of(FRAMES), "action": Stats.of(ACTIONS)}
BATCH = {
    "observation.state": torch.from_numpy(FRAMES),
    "action": torch.from_numpy(ACTIONS)[:, None].repeat(1, 5, 1),
    "action_is_pad": torch.zeros(500, 5, dtype=torch.bool),
    "task_index": torch.arange(500),
}


def test_mean_std_gives_mean_0_and_deviation_1_and_constants_become_0() -> None:
    state = Preprocessor.from_stats(STATS, {"observation.": "mean_std"})(BATCH)["observation.state"]
    torch.testing.assert_close(state[:, :2].mean(dim=0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(state[:, :2].std(dim=0), torch.ones(2), atol=3e-3, rtol=0)
    assert state[:, 2:].abs().max() < 1e-6


def test_min_max_gives_minus_1_to_1() -> None:
    batch = Preprocessor.from_stats(STATS, {"": "min_max"})(BATCH)
    for name in ("observation.state", "action"):
        flat = batch[name].flatten(0, -2)
        assert flat.abs().max() <= 1 + 1e-5
    assert batch["action"].flatten(0, 1).amin(dim=0).tolist() == pytest.approx([-1] * 3, abs=1e-5)
    assert batch["action"].flatten(0, 1).amax(dim=0).tolist() == pytest.approx([1] * 3, abs=1e-5)


def test_the_longest_prefix_decides_and_the_rest_passes_unchanged() -> None:
    modes = {"observation.": "mean_std", "observation.state": "identity", "action": "min_max"}
    preprocessor = Preprocessor.from_stats(STATS, modes)
    assert set(preprocessor.normalizers) == {"action"}
    batch = preprocessor(BATCH)
    for name in ("observation.state", "task_index", "action_is_pad"):
        assert batch[name] is BATCH[name]
    with pytest.raises(ValueError, match=r"mode = 'median', known: mean_std, min_max, identity"):
        Preprocessor.from_stats(STATS, {"action": "median"})


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "identity"])
def test_actions_come_back(mode: str) -> None:
    preprocessor = Preprocessor.from_stats(STATS, {"action": mode})
    back = preprocessor.postprocessor()(preprocessor(BATCH)["action"])
    torch.testing.assert_close(back, BATCH["action"], atol=1e-5, rtol=1e-5)


def test_the_batch_is_left_as_it_was() -> None:
    before = {name: value.clone() for name, value in BATCH.items()}
    Preprocessor.from_stats(STATS, {"": "mean_std"})(BATCH)
    assert all(torch.equal(before[name], BATCH[name]) for name in BATCH)


def test_renamed_features_take_their_statistics_and_padding_along() -> None:
    preprocessor = Preprocessor.from_stats(
        STATS, {"observation.": "mean_std", "action": "min_max"}, {"action": "observation.goal"}
    )
    batch = preprocessor(BATCH)
    assert "action" not in batch
    assert batch["observation.goal_is_pad"] is BATCH["action_is_pad"]
    goals = batch["observation.goal"].flatten(0, 1)
    torch.testing.assert_close(goals.mean(dim=0), torch.zeros(3), atol=1e-4, rtol=0)


def test_saved_and_loaded_it_does_the_same_to_the_last_bit(tmp_path: Path) -> None:
    saved = Preprocessor.from_stats(STATS, {"": "mean_std"}, {"observation.state": "observation.s"})
    saved.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "preprocessor.json",
        "preprocessor.safetensors",
    ]
    loaded = Preprocessor.from_pretrained(tmp_path)
    one, two = saved(BATCH), loaded(BATCH)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    action = torch.randn(2, 5, 3)
    restored = Postprocessor.from_pretrained(tmp_path)(action)
    assert torch.equal(restored, saved.postprocessor()(action))


def test_nothing_to_normalize_is_saved_too(tmp_path: Path) -> None:
    Preprocessor().save_pretrained(tmp_path)
    assert Preprocessor.from_pretrained(tmp_path) == Preprocessor()


def test_what_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor.json cannot be read"):
        Preprocessor.from_pretrained(tmp_path)
    preprocessor = Preprocessor.from_stats(STATS, {"action": "mean_std"})
    preprocessor.save_pretrained(tmp_path)
    (tmp_path / "preprocessor.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ConfigError, match=r"is damaged"):
        Preprocessor.from_pretrained(tmp_path)
    Preprocessor().save_pretrained(tmp_path)
    path = tmp_path / "preprocessor.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**plain, "modes": {"action": "mean_std"}}))
    with pytest.raises(ConfigError, match=r"its two files disagree"):
        Preprocessor.from_pretrained(tmp_path)
    path.write_text(json.dumps({**plain, "format_version": 9}))
    with pytest.raises(ConfigError, match=r"has format_version = 9, but 1 is read here"):
        Preprocessor.from_pretrained(tmp_path)


def test_statistics_go_to_a_device_once() -> None:
    normalizer = Preprocessor.from_stats(STATS, {"observation": "mean_std"}).normalizers[
        "observation.state"
    ]
    with torch.inference_mode():
        normalizer(torch.ones(2, 4, device="meta"))
        first = normalizer._beside(torch.ones(2, 4, device="meta"))
    normalizer.inverse(torch.ones(2, 4, device="meta", requires_grad=True)).sum().backward()
    second = normalizer._beside(torch.ones(2, 4, device="meta"))
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True]
    assert first[0].device.type == "meta"
    assert torch.equal(normalizer(torch.from_numpy(FRAMES))[:, 2], torch.zeros(500))


def test_only_copies_towards_a_device_go_on_behind_our_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy from a GPU to the host that is not waited for is read before it has arrived."""
    asked: list[tuple[str, bool]] = []

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        asked.append((torch.device(device).type, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    for device in ("cpu", "meta"):
        Preprocessor({}, {})({"action": torch.ones(2)}, torch.device(device))
    assert asked == [("cpu", False), ("meta", True)]
