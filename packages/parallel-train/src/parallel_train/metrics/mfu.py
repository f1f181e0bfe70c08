"""MFU of a run, where the model's arithmetic and the device's peak are known."""

from __future__ import annotations

import torch

from parallel_engine.flops import Precision, count_flops, peak_flops
from parallel_train.config import TrainConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.policies.factory import build_policy
from parallel_train.policies.processors import Preprocessor


def flops_per_sample(config: TrainConfig, dataset: LeRobotDataset) -> int:
    """Floating-point operations that one sample costs in an update: forward and backward.

    Counted once on the meta device, on one sample; nothing is computed.

    Raises:
        Exception: whatever the policy raises where tensors hold no values.
    """
    batch = {name: value.to("meta") for name, value in dataset.__getitems__([0]).items()}
    # Without normalizers: only names, shapes and dtypes decide what is counted.
    batch = Preprocessor(rename=config.dataset.rename)(batch)
    # Building a model draws numbers, and the run's must not change because mfu is counted.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        # A model may keep tables in memory that it looks up, wherever it is built.
        model = build_policy(config.policy, dataset.spec).to("meta")
        return count_flops(lambda: model(batch)[0].backward())


def device_peak(config: TrainConfig, device: torch.device) -> float | None:
    """Operations per second of one device in the run's precision; None where it is not known."""
    if config.logging.peak_flops is not None:
        return config.logging.peak_flops
    if device.type != "cuda":
        return None
    accelerator = config.accelerator.decided(on_cuda=True)
    precision: Precision = "tf32" if accelerator.tf32 else "fp32"
    if accelerator.mixed_precision != "no":
        precision = "half"
    return peak_flops(torch.cuda.get_device_name(device), precision)


def samples_per_s_at_peak(
    config: TrainConfig, dataset: LeRobotDataset, device: torch.device, world_size: int
) -> tuple[float | None, str | None]:
    """Throughput of all ranks if they did nothing but the model's arithmetic, at their peak.

    A run's MFU is its own throughput over this. None where it is not known; the second value then
    is a line that says why, if it was to be expected.
    """
    peak = device_peak(config, device)
    if peak is None:
        return None, None
    try:
        cost = flops_per_sample(config, dataset)
    except Exception as error:  # a policy of the user's own need not run without values
        return None, f"mfu: not known, the policy does not run on the meta device: {error}"
    # A model without counted operations has no MFU.
    return (peak * world_size / cost, None) if cost else (None, None)
