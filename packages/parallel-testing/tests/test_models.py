"""The tiny models have the peculiarities they promise, and train."""

import torch

from parallel_testing.models import OddModel, TinyModel


def test_same_weights_everywhere_and_no_stream_touched():
    before = torch.get_rng_state()
    first, second = TinyModel(), TinyModel()
    assert torch.equal(before, torch.get_rng_state())
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_odd_model_is_odd():
    model = OddModel()
    assert model.second_head.weight is model.head.weight
    assert not model.embed.weight.requires_grad
    assert model.scalar.shape == ()
    assert "count" in model.state_dict()
    assert "scale" not in model.state_dict()
    model(torch.randn(2, 4)).sum().backward()
    assert model.unused.weight.grad is None
    assert model.five.grad is not None


def test_odd_model_without_oddities_on_meta():
    with torch.device("meta"):
        model = OddModel(
            tied=False, frozen=False, scalar=False, buffers=False, unused=False, seed=None
        )
    assert all(parameter.is_meta and parameter.ndim > 0 for parameter in model.parameters())
    assert not list(model.buffers())
