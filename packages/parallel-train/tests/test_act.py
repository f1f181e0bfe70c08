"""ACT against the paper's equations and shapes, and against torch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_config import ConfigError
from parallel_train.data.spec import DataSpec, Feature
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.act.modeling import ACTDecoderLayer, ACTEncoderLayer, ACTPolicy
from parallel_train.policies.chunks import ChunkQueue
from parallel_train.policies.transformer import Attention

SPEC = DataSpec(
    10,
    {
        "observation.state": Feature("float32", (5,)),
        "observation.environment_state": Feature("float32", (7,)),
        "action": Feature("float32", (3,)),
    },
    ("open", "close"),
)


def tiny(**changes: Any) -> ACTConfig:
    sizes: dict[str, Any] = {
        "chunk_size": 6,
        "dim_model": 16,
        "n_heads": 2,
        "dim_feedforward": 32,
        "latent_dim": 4,
        "dropout": 0.0,
    }
    return ACTConfig(**{**sizes, **changes})


def policy(spec: DataSpec = SPEC, **changes: Any) -> ACTPolicy:
    torch.manual_seed(0)
    return ACTPolicy(tiny(**changes), spec)


def batch(count: int = 4, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.arange(count) % 6 + 1
    return {
        "observation.state": torch.randn(count, 5, generator=generator),
        "observation.environment_state": torch.randn(count, 7, generator=generator),
        "task_index": torch.arange(count) % 2,
        "action": torch.randn(count, 6, 3, generator=generator),
        "action_is_pad": torch.arange(6) >= lengths[:, None],
    }


def with_noise(model: ACTPolicy, inputs: dict[str, Tensor], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(inputs)[0]
    return loss


def test_attention_equals_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(16, 4, 0.0), nn.MultiheadAttention(16, 4, batch_first=True)
    copy_attention(theirs, ours)
    q, k, v = torch.randn(3, 5, 16), torch.randn(3, 7, 16), torch.randn(3, 7, 16)
    ignored = torch.arange(7) >= torch.tensor([7, 3, 1])[:, None]
    expected, _ = theirs(q, k, v, key_padding_mask=ignored)
    torch.testing.assert_close(ours(q, k, v, ignored), expected)


def copy_attention(theirs: nn.MultiheadAttention, ours: Attention) -> None:
    parts = (ours.to_q, ours.to_k, ours.to_v)
    theirs.in_proj_weight.data = torch.cat([part.weight.data for part in parts])
    theirs.in_proj_bias.data = torch.cat([part.bias.data for part in parts])
    theirs.out_proj.load_state_dict(ours.to_out.state_dict())


def copy_rest(theirs: Any, ours: Any) -> None:
    theirs.linear1.load_state_dict(ours.feed_forward[0].state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward[3].state_dict())
    for name in ("norm1", "norm2", "norm3"):
        if hasattr(ours, name):
            getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())


def test_layers_are_the_post_norm_transformers_of_the_paper() -> None:
    """Against torch's, which know no positions: those are added where the paper adds them."""
    torch.manual_seed(0)
    encoder, decoder = ACTEncoderLayer(tiny()), ACTDecoderLayer(tiny())
    for part in (*encoder.modules(), *decoder.modules()):
        if isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight)
            nn.init.normal_(part.bias)
    sizes = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    plain = nn.TransformerEncoderLayer(**sizes)
    copy_attention(plain.self_attn, encoder.attention)
    copy_rest(plain, encoder)
    torch.testing.assert_close(encoder(x, torch.zeros(5, 16)), plain(x))
    position = torch.randn(5, 16)
    read = plain.self_attn(x + position, x + position, x)[0]  # into queries and keys alone
    middle = plain.norm1(x + read)
    expected = plain.norm2(middle + plain.linear2(plain.linear1(middle).relu()))
    torch.testing.assert_close(encoder(x, position), expected)

    other = nn.TransformerDecoderLayer(**sizes)
    copy_attention(other.self_attn, decoder.self_attention)
    copy_attention(other.multihead_attn, decoder.cross_attention)
    copy_rest(other, decoder)
    none = torch.zeros(5, 16), torch.zeros(7, 16)
    torch.testing.assert_close(decoder(x, none[0], memory, none[1]), other(x, memory))
    query, place = torch.randn(5, 16), torch.randn(7, 16)
    y = other.norm1(x + other.self_attn(x + query, x + query, x)[0])
    y = other.norm2(y + other.multihead_attn(y + query, memory + place, memory)[0])
    y = other.norm3(y + other.linear2(other.linear1(y).relu()))
    torch.testing.assert_close(decoder(x, query, memory, place), y)


def test_the_style_variable_is_read_off_the_summary_token() -> None:
    """q(z | a, s): a summary token, the state and the actions, at sinusoidal positions."""
    model, inputs = policy(), batch()
    assert model.vae is not None
    # Summary, two vectors, the task, and six actions.
    assert model.vae.positions.shape == (1 + 2 + 1 + 6, 16)
    first = model.vae.positions[3]
    assert first[:2].tolist() == pytest.approx([math.sin(3), math.cos(3)])
    mean, log_variance = model.vae(inputs)
    assert mean.shape == log_variance.shape == (4, 4)
    for name in ("observation.state", "action"):
        other = {**inputs, name: inputs[name] + 1}
        assert (model.vae(other)[0] - mean).abs().amax(dim=1).min() > 1e-6


PAPER = ACTConfig(
    chunk_size=100,
    dim_model=512,
    n_heads=8,
    dim_feedforward=3200,
    n_encoder_layers=4,
    n_decoder_layers=7,
    n_vae_layers=4,
    latent_dim=32,
    temporal_ensemble=0.01,
    cameras=tuple(f"observation.images.{n}" for n in ("front", "left", "right", "top")),
)


def test_the_papers_settings_give_its_shapes_and_size() -> None:
    """Four 480 x 640 pictures make 1200 tokens beside those of joints and z; about 80M weights."""
    pytest.importorskip("torchvision", reason="needs the extra vision")
    cameras = {name: Feature("video", (480, 640, 3)) for name in PAPER.cameras}
    joints = {"observation.state": Feature("float32", (14,)), "action": Feature("float32", (14,))}
    model = ACTPolicy(PAPER, DataSpec(50, {**joints, **cameras}))
    assert 75e6 < sum(p.numel() for p in model.parameters()) < 90e6
    pictures = {name: torch.zeros(1, 3, 480, 640) for name in PAPER.cameras}
    with torch.no_grad():
        inputs = {"observation.state": torch.zeros(1, 14), **pictures}
        memory, positions = model._memory(inputs, torch.zeros(1, 32))
        chunk = model.eval().predict_action_chunk(inputs)
    assert memory.shape == (1, 1202, 512)
    assert positions.shape == (1202, 512)
    assert chunk.shape == (1, 100, 14)
    assert (PAPER.kl_weight, ACTConfig().kl_weight) == (10, 10)


def test_loss_is_the_l1_of_unpadded_entries_plus_weighted_kl() -> None:
    model, inputs = policy(kl_weight=3.0), batch()
    loss = with_noise(model, inputs)
    assert model.vae is not None
    mean, log_variance = model.vae(inputs)
    torch.manual_seed(0)
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    q = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    kl = torch.distributions.kl_divergence(q, prior).sum(dim=-1)
    valid = ~inputs["action_is_pad"]
    error = (model._decode(inputs, z) - inputs["action"]).abs()[valid].mean()
    weights = valid.sum(dim=1) / valid.sum()
    torch.testing.assert_close(loss, error + 3.0 * (weights * kl).sum())
    metrics = model(inputs)[1]
    assert set(metrics) == {"l1_loss", "kl_loss"}
    assert not any(value.requires_grad for value in metrics.values())


def test_padding_does_not_reach_the_loss_or_the_latent() -> None:
    model, inputs = policy(), batch()
    other = {**inputs, "action": inputs["action"].clone()}
    other["action"][inputs["action_is_pad"]] = 99.0
    torch.testing.assert_close(with_noise(model, inputs), with_noise(model, other))


def test_weighted_parts_add_up_to_the_large_batch() -> None:
    """Unequal padding: a mean of means would be off, weights by entries are exact."""
    model, whole = policy(use_vae=False), batch(8)
    halves = [{k: v[part] for k, v in whole.items()} for part in (slice(0, 3), slice(3, 8))]
    weights = [float(model.loss_weight(half)) for half in halves]
    assert sum(weights) == float(model.loss_weight(whole)) == (~whole["action_is_pad"]).sum() * 3
    losses = [with_noise(model, half).item() for half in halves]
    together = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    assert together == pytest.approx(with_noise(model, whole).item(), rel=1e-6)
    assert sum(losses) / 2 != pytest.approx(together, rel=1e-3)


def test_a_batch_that_is_all_padding_contributes_zero() -> None:
    model, inputs = policy(), batch()
    inputs["action_is_pad"][:] = True
    loss = with_noise(model, inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert float(model.loss_weight(inputs)) == 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_every_parameter_learns() -> None:
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):  # biases begin at zero, and hide what is behind them until they move
        optimizer.zero_grad()
        with_noise(model, batch()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A decoder that starts at zero attends to equal values in its first layer, so that only biases
    # have an effect there (as in DETR); a bias of the keys never has one.
    first = tuple(f"decoder.0.self_attention.to_{name}" for name in ("q", "k", "v.weight"))
    assert all(name.startswith(first) or name.endswith("to_k.bias") for name in idle), idle


def test_inference_is_the_mean_of_the_prior() -> None:
    model, inputs = policy(dropout=0.5).eval(), batch()
    chunk = model.predict_action_chunk(inputs)
    assert not chunk.requires_grad
    assert chunk.shape == (4, 6, 3)
    assert torch.equal(chunk, model.predict_action_chunk(inputs))
    assert torch.equal(chunk, model._decode(inputs, torch.zeros(4, 4)))
    observation = {k: v for k, v in inputs.items() if not k.startswith("action")}
    assert torch.equal(chunk, model.predict_action_chunk(observation))


def test_the_task_is_read_where_there_are_several() -> None:
    model, inputs = policy().eval(), batch()
    flipped = {**inputs, "task_index": 1 - inputs["task_index"]}
    found = model.predict_action_chunk(flipped)
    assert not torch.allclose(model.predict_action_chunk(inputs), found)
    alone = policy(DataSpec(10, SPEC.features, ("open",)))
    assert alone.observation.task is None
    assert policy(use_task=False).observation.task is None


def test_without_the_vae_there_is_no_kl_and_nothing_random() -> None:
    model, inputs = policy(use_vae=False), batch()
    assert not any(name.startswith("vae") for name, _ in model.named_parameters())
    assert torch.equal(with_noise(model, inputs, 0), with_noise(model, inputs, 1))
    assert float(model(inputs)[1]["kl_loss"]) == 0


def test_it_learns_a_chunk_by_heart() -> None:
    model, inputs = policy(kl_weight=0.1), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = with_noise(model, inputs).item()
    for _ in range(150):
        optimizer.zero_grad()
        model(inputs)[0].backward()
        optimizer.step()
    assert with_noise(model, inputs).item() < 0.25 * first


def chunks() -> Any:
    """Chunk number n says 100 n + its own action number, for one robot with one joint."""
    numbers = iter(range(1000))
    return lambda: (100.0 * next(numbers) + torch.arange(4.0))[None, :, None]


def test_chunks_are_executed_one_after_another() -> None:
    queue, predict = ChunkQueue(3, None), chunks()
    actions = [float(queue.next_action(predict)) for _ in range(7)]
    assert actions == [0, 1, 2, 100, 101, 102, 200]
    queue.clear()
    assert float(queue.next_action(predict)) == 300


def test_temporal_ensembling_is_the_papers_weighted_mean() -> None:
    """Action of frame t: every chunk n in t-3..t says 100 n + (t - n), the oldest weighs 1."""
    m, queue, predict = 0.3, ChunkQueue(4, 0.3), chunks()
    for t in range(9):
        numbers = range(max(0, t - 3), t + 1)
        weights = [math.exp(-m * i) for i in range(len(numbers))]
        said = [100 * n + (t - n) for n in numbers]
        expected = sum(w * s for w, s in zip(weights, said, strict=True)) / sum(weights)
        assert float(queue.next_action(predict)) == pytest.approx(expected, rel=1e-5), t


def test_select_action_walks_through_the_chunk_until_reset() -> None:
    model, inputs = policy(n_action_steps=2).eval(), batch(1)
    chunk = model.predict_action_chunk(inputs)
    other = batch(1, seed=5)
    assert torch.equal(model.select_action(inputs), chunk[:, 0])
    assert torch.equal(model.select_action(other), chunk[:, 1])
    assert torch.equal(model.select_action(other), model.predict_action_chunk(other)[:, 0])
    model.reset()
    assert torch.equal(model.select_action(inputs), chunk[:, 0])
    assert not model.select_action(inputs).requires_grad


def test_declared_units_and_methods_exist() -> None:
    model = policy()
    classes = {type(module).__name__ for module in model.modules()}
    assert set(model._fsdp_wrap_modules) <= classes
    assert all(callable(getattr(model, name)) for name in model._fsdp_forward_methods)
    assert tiny().delta_timestamps(10) == {"action": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 3}, r"policy.n_heads = 3 does not divide policy.dim_model = 16.*n_heads [24]"),
        ({"chunk_size": 0}, r"policy.chunk_size = 0, but it must be at least 1"),
        ({"dim_model": 15, "n_heads": 3}, r"policy.dim_model = 15, but it must be even"),
        ({"n_action_steps": 7}, r"policy.n_action_steps = 7 lies outside 1..policy.chunk_size = 6"),
        ({"dropout": 1.0}, r"policy.dropout = 1.0 lies outside \[0, 1\)"),
        ({"kl_weight": -1.0}, r"policy.kl_weight = -1.0, but it must be at least 0"),
        (
            {"temporal_ensemble": 0.01, "n_action_steps": 3},
            r"policy.temporal_ensemble = 0.01 predicts at every step",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)


def test_a_dataset_that_does_not_fit_is_refused() -> None:
    blind = DataSpec(10, {"action": Feature("float32", (3,))})
    with pytest.raises(ConfigError, match=r"a float vector named observation"):
        policy(blind)
    idle = DataSpec(10, {"observation.state": Feature("float32", (3,))})
    with pytest.raises(ConfigError, match=r"feature 'action' is missing.*It|feature 'action'"):
        policy(idle)
