"""The world-action model: who reads whom, the flow's equations, sizes, and that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_config import AcceleratorConfig, ConfigError, ParallelismConfig
from parallel_engine.plan import plan
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.policies.wam.configuration import PRESETS, WAMConfig
from parallel_train.policies.wam.layers import MoTLayer
from parallel_train.policies.wam.modeling import WAMPolicy

SPEC = DataSpec(
    10,
    {
        "observation.state": Feature("float32", (5,)),
        "observation.environment_state": Feature("float32", (2,)),
        "action": Feature("float32", (3,)),
    },
    ("open the box", "close"),
)


def tiny(**changes: Any) -> WAMConfig:
    sizes: dict[str, Any] = {
        "n_layers": 2,
        "n_heads": 2,
        "head_dim": 8,
        "width": 24,
        "action_width": 16,
        "chunk_size": 6,
        "world_frames": 2,
        "world_stride": 3,
        "num_flow_steps": 4,
    }
    return WAMConfig(**{**sizes, **changes})


def policy(moved: bool = True, **changes: Any) -> WAMPolicy:
    """With `moved`, what begins at zero (gates, outputs) gets random weights, so that it shows."""
    torch.manual_seed(0)
    model = WAMPolicy(tiny(**changes), SPEC)
    if moved:
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch(count: int = 4, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.arange(count) % 6 + 1
    return {
        "observation.state": torch.randn(count, 3, 5, generator=generator),
        "observation.state_is_pad": torch.tensor([0, 3, 6]) >= lengths[:, None],
        "task_index": torch.arange(count) % 2,
        "action": torch.randn(count, 6, 3, generator=generator),
        "action_is_pad": torch.arange(6) >= lengths[:, None],
    }


def with_noise(model: WAMPolicy, inputs: dict[str, Tensor], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(inputs)[0]
    return loss


def test_a_layer_is_one_attention_over_all_streams() -> None:
    """Against the same layer written out for clean streams: concatenate, attend, cut apart."""
    torch.manual_seed(0)
    layer = MoTLayer((8, 12), n_heads=2, head_dim=4, conditions=(None, None))
    xs = torch.randn(3, 5, 8), torch.randn(3, 2, 12)
    seen = torch.ones(3, 1, 7, 7, dtype=torch.bool)
    found = layer(xs, torch.zeros(3, 1), seen)
    parts = []
    for stream, x in zip(layer.streams, xs, strict=True):
        q, k, v = stream.to_qkv(stream.norm1(x)).unflatten(-1, (3, 2, 4)).unbind(2)
        parts.append((stream.norm_q(q), stream.norm_k(k), v))
    q, k, v = (torch.cat(p, dim=1) for p in zip(*parts, strict=True))
    weights = torch.einsum("bqhe,bkhe->bhqk", q, k).mul(4**-0.5).softmax(dim=-1)
    read = torch.einsum("bhqk,bkhe->bqhe", weights, v).flatten(2).split([5, 2], dim=1)
    for stream, x, r, y in zip(layer.streams, xs, read, found, strict=True):
        middle = x + stream.to_out(r)
        h = stream.norm2(middle)
        network = stream.feed_forward
        expected = middle + network.down(F.silu(network.gate(h)) * network.up(h))
        torch.testing.assert_close(y, expected)


def test_conditioned_streams_begin_as_the_identity() -> None:
    torch.manual_seed(0)
    layer = MoTLayer((8, 12), n_heads=2, head_dim=4, conditions=(None, 6))
    xs = torch.randn(3, 5, 8), torch.randn(3, 2, 12)
    found = layer(xs, torch.randn(3, 6), torch.ones(3, 1, 7, 7, dtype=torch.bool))
    assert torch.equal(found[1], xs[1])
    assert not torch.equal(found[0], xs[0])


def velocities(model: WAMPolicy, **changes: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = {
        "task": torch.tensor([0, 1]),
        "now": torch.randn(2, 5, generator=generator),
        "world": torch.randn(2, 2, 5, generator=generator),
        "action": torch.randn(2, 6, 3, generator=generator),
        "time": torch.tensor([0.3, 0.7]),
        **changes,
    }
    context = model._context({"observation.state": x["now"], "task_index": x["task"]})
    noisy = {name: x[name] for name in ("world", "action")}
    found = model._velocities(context, noisy, x["time"])
    return found["world"], found["action"]


@pytest.mark.parametrize(
    "changes",
    [
        {"task": torch.tensor([1, 0])},
        {"now": torch.zeros(2, 5)},
        {"world": torch.zeros(2, 2, 5)},
        {"action": torch.zeros(2, 6, 3)},
        {"time": torch.tensor([0.9, 0.1])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_world_and_action_read_everything(changes: dict[str, Tensor]) -> None:
    model = policy()
    for before, after in zip(velocities(model), velocities(model, **changes), strict=True):
        assert (before - after).abs().amax(dim=(1, 2)).min() > 1e-4


def test_the_context_does_not_read_noise_and_no_token_reads_the_filling_of_a_text() -> None:
    model = policy()
    contexts: list[Tensor] = []
    hook = model.layers[0].register_forward_hook(
        lambda module, arguments, output: contexts.append(output[0])
    )
    velocities(model)
    velocities(model, world=torch.zeros(2, 2, 5), action=torch.zeros(2, 6, 3))
    hook.remove()
    torch.testing.assert_close(contexts[0], contexts[1])
    before = velocities(model)
    with torch.no_grad():
        model.context.byte.weight[256] = 5.0  # what stands behind the end of "close"
    after = velocities(model)
    torch.testing.assert_close(before, after)


def test_loss_is_the_error_of_the_straight_flows_velocity() -> None:
    model, inputs = policy(world_weight=0.7), batch()
    loss = with_noise(model, inputs)
    torch.manual_seed(0)
    time = torch.rand(4)
    world, action = inputs["observation.state"][:, 1:], inputs["action"]
    noises = torch.randn_like(world), torch.randn_like(action)
    t = time[:, None, None]
    found = velocities(
        model,
        task=inputs["task_index"],
        now=inputs["observation.state"][:, 0],
        world=(1 - t) * noises[0] + t * world,
        action=(1 - t) * noises[1] + t * action,
        time=time,
    )
    valid = ~inputs["action_is_pad"]
    error = (found[1] - (action - noises[1])).square()[valid].mean()
    frames = ~inputs["observation.state_is_pad"][:, 1:]
    squares = (found[0] - (world - noises[0])).square().mean(dim=-1)
    world_error = torch.stack(
        [s[f].mean() if f.any() else s.new_zeros(()) for s, f in zip(squares, frames, strict=True)]
    )
    weights = valid.sum(dim=1) / valid.sum()
    torch.testing.assert_close(loss, error + 0.7 * (weights * world_error).sum())


def test_weighted_parts_add_up_to_the_large_batch() -> None:
    model, whole = policy(), batch(8)
    parts = [{k: v[part] for k, v in whole.items()} for part in (slice(0, 3), slice(3, 8))]
    generator = torch.Generator().manual_seed(0)
    errors = {
        "world": torch.rand(8, 2, 5, generator=generator),
        "action": torch.rand(8, 6, 3, generator=generator),
    }
    loss = model._loss(whole, errors)[0]
    losses = [
        model._loss(part, {name: e[cut] for name, e in errors.items()})[0]
        for part, cut in zip(parts, (slice(0, 3), slice(3, 8)), strict=True)
    ]
    weights = [model.loss_weight(part) for part in parts]
    together = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    torch.testing.assert_close(loss, together)


def test_inference_follows_the_velocity_from_noise() -> None:
    model, inputs = policy().eval(), batch()
    torch.manual_seed(5)
    world, pictures, action = model.predict_future(inputs)
    assert pictures is None
    assert world.shape == (4, 2, 5)
    assert action.shape == (4, 6, 3)
    torch.manual_seed(5)
    x, y = torch.empty(4, 2, 5).normal_(), torch.empty(4, 6, 3).normal_()
    now = inputs["observation.state"][:, 0]
    for step in range(4):
        at = {"world": x, "action": y, "time": torch.full((4,), step / 4)}
        found = velocities(model, task=inputs["task_index"], now=now, **at)
        x, y = x + found[0] / 4, y + found[1] / 4
    torch.testing.assert_close((world, action), (x, y))
    torch.manual_seed(5)
    live = {"observation.state": now, "task_index": inputs["task_index"]}
    torch.testing.assert_close(model.predict_action_chunk(live), action)


def test_select_action_walks_through_the_chunk_until_reset() -> None:
    model, inputs = policy(n_action_steps=2).eval(), batch(1)
    torch.manual_seed(0)
    chunk = model.predict_action_chunk(inputs)
    torch.manual_seed(0)
    assert torch.equal(model.select_action(inputs), chunk[:, 0])
    assert torch.equal(model.select_action(inputs), chunk[:, 1])
    model.reset()
    torch.manual_seed(0)
    assert torch.equal(model.select_action(inputs), chunk[:, 0])


def test_it_learns_two_demonstrations_and_plays_them() -> None:
    model, inputs = policy(moved=False), batch(2)
    inputs["action_is_pad"][:] = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    first = with_noise(model, inputs).item()
    for _ in range(300):
        optimizer.zero_grad()
        model(inputs)[0].backward()
        optimizer.step()
    assert with_noise(model, inputs).item() < 0.4 * first
    error = (model.predict_action_chunk(inputs) - inputs["action"]).abs().mean().item()
    assert error < 0.4 * inputs["action"].abs().mean().item()


def test_every_parameter_gets_a_gradient() -> None:
    """One without would stop DDP at the second update."""
    model = policy(moved=False)
    with_noise(model, batch()).backward()  # type: ignore[no-untyped-call]
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_several_observations_make_one_world() -> None:
    both = ("observation.state", "observation.environment_state")
    model = policy(world=both)
    inputs = {**batch(), "observation.environment_state": torch.randn(4, 3, 2)}
    assert model.predict_future(inputs)[0].shape == (4, 2, 7)
    assert with_noise(model, inputs).isfinite()
    with pytest.raises(ConfigError, match=r"feature 'observation.images' is missing"):
        policy(world=("observation.images",))


@pytest.mark.parametrize(
    ("preset", "least", "most"),
    [("tiny", 2e6, 4e6), ("100m", 0.9e8, 1.4e8), ("1b", 0.9e9, 1.1e9), ("6b", 5.8e9, 6.2e9)],
)
def test_presets_have_the_size_they_are_named_for(preset: Any, least: float, most: float) -> None:
    assert preset in PRESETS
    with torch.device("meta"):
        model = WAMPolicy(WAMConfig(preset=preset), SPEC)
    assert least < sum(parameter.numel() for parameter in model.parameters()) < most
    inside = sum(p.numel() for layer in model.layers for p in layer.parameters())
    assert inside > 0.9 * sum(p.numel() for p in model.parameters())  # the wrap units hold it


def test_the_largest_preset_is_planned_for_eight_ranks() -> None:
    """Without memory for a single weight of it."""
    found = plan(
        lambda: WAMPolicy(WAMConfig(preset="6b"), SPEC),
        ParallelismConfig(dp_shard=-1),
        AcceleratorConfig(mixed_precision="bf16"),
        8,
        batch_size=1,
    )
    layers = [unit for unit in found.units if unit.name.startswith("layers.")]
    assert len(layers) == PRESETS["6b"].n_layers
    assert 5.8e9 < sum(unit.num_params for unit in found.units) < 6.2e9
    assert max(unit.num_params for unit in layers) < 2.5e8


def test_deltas_sizes_units_and_methods_follow_from_the_config() -> None:
    assert tiny().delta_timestamps(10) == {
        "action": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
        "observation.state": [0.0, 0.3, 0.6],
    }
    assert WAMConfig(preset="6b", n_layers=2).sizes.n_layers == 2
    assert WAMConfig(preset="6b", n_layers=2).sizes.width == PRESETS["6b"].width
    model = policy()
    assert {type(m).__name__ for m in model.modules()} >= set(model._fsdp_wrap_modules)
    assert all(callable(getattr(model, name)) for name in model._fsdp_forward_methods)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 0}, r"policy.n_layers = 0, but it must be at least 1"),
        ({"preset": "7b"}, r"policy.preset = '7b' is unknown.*tiny or 100m or 1b or 6b"),
        ({"world": ()}, r"policy.world = \[\] does not name an observation"),
        ({"n_action_steps": 9}, r"policy.n_action_steps = 9 exceeds policy.chunk_size = 6"),
        ({"world_weight": -1.0}, r"policy.world_weight = -1.0, but it must be at least 0"),
        ({"camera_weight": -1.0}, r"policy.camera_weight = -1.0, but it must be at least 0"),
        ({"image_size": 24, "patch_size": 16}, r"policy.patch_size = 16 does not divide.*_size 12"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)


def test_narrow_precision_computes_and_learns() -> None:
    model, inputs = policy(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = with_noise(model, inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    full = with_noise(model, inputs)
    assert loss.item() == pytest.approx(full.item(), rel=0.05)
    assert loss.item() != full.item()


def test_only_observations_are_the_world_of_a_new_run() -> None:
    older = WAMConfig(world=("observation.state", "effort"))  # as a saved model may name it
    (problem,) = older.new_run_problems()
    assert problem.message.startswith("names 'effort', but ")
    assert "--dataset.rename effort=observation.effort" in problem.remedy
    assert not list(WAMConfig().new_run_problems())
