"""Counting a model's arithmetic, and what devices can do."""

import pytest
import torch

from parallel_engine.flops import count_flops, peak_flops
from parallel_testing.models import TinyModel


def test_an_update_counts_each_product_three_times():
    """Forward, and backward for the weights and for the activations (not for the input)."""
    with torch.device("meta"):
        model, x = TinyModel(seed=None), torch.empty(5, 4)
    state = torch.get_rng_state()
    found = count_flops(lambda: model(x).sum().backward())
    assert torch.equal(state, torch.get_rng_state())
    products = {"embed": 4 * 8, "blocks": 2 * 8 * 8, "head": 8 * 3}
    forward = 2 * 5 * sum(products.values())
    assert found == 3 * forward - 2 * 5 * products["embed"]


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "half", 989e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5e12),
        ("NVIDIA H100 PCIe", "half", 756e12),
        ("NVIDIA H100 NVL", "half", 835.5e12),
        ("NVIDIA H200 NVL", "tf32", 417.5e12),
        ("NVIDIA GH200 480GB", "half", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "half", None),
        ("NVIDIA L40S", "half", 362e12),
        ("NVIDIA A10", "half", 125e12),
        ("NVIDIA A10G", "half", 70e12),
        ("NVIDIA RTX 6000 Ada Generation", "half", 364.2e12),
        ("NVIDIA GeForce RTX 5090", "tf32", 104.8e12),
        ("NVIDIA GeForce RTX 4090", "half", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", "half", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "half", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA L4", "half", 121e12),
        ("NVIDIA L40", "half", None),
        ("cpu", "fp32", None),
    ],
)
def test_peaks_by_device(name, precision, peak):
    assert peak_flops(name, precision) == peak
