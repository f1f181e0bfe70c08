"""Model FLOPs utilization: the arithmetic of the model per second, over what the device could do.

The definition is that of PaLM (arXiv:2204.02311, appendix B): what activation checkpointing
computes a second time does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

Precision = Literal["fp32", "tf32", "half"]

# Dense peaks in TFLOP/s from NVIDIA's data sheets, as (fp32, tf32, fp16 or bf16).
_PEAKS: dict[str, tuple[float, float, float]] = {
    "B200": (80, 1125, 2250),
    "H200": (67, 494.5, 989),
    "H100 PCIe": (51, 378, 756),
    "H100": (67, 494.5, 989),
    "A100": (19.5, 156, 312),
    "L40S": (91.6, 183, 362),
    "A10G": (31.5, 35, 70),
    "L4": (30.3, 60, 121),
}
_COLUMNS: dict[Precision, int] = {"fp32": 0, "tf32": 1, "half": 2}


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Floating-point operations per second of one device at best; None where it is not known.

    `device_name` is what `torch.cuda.get_device_name` says.
    """
    words = device_name.replace("-", " ").split()
    for name, peaks in _PEAKS.items():
        if all(word in words for word in name.split()):
            return peaks[_COLUMNS[precision]] * 1e12
    return None


def count_flops(update: Callable[[], object]) -> int:
    """Operations of matrix products, convolutions and attention in `update`, by torch's counter.

    Nothing is computed where its tensors are on the meta device.
    """
    with FlopCounterMode(display=False) as counter, torch.random.fork_rng(devices=[]):
        update()
    return int(counter.get_total_flops())
