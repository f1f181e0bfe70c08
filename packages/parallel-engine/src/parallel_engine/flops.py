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

# Dense peaks in TFLOP/s, as (fp32, tf32, fp16 or bf16
# with fp32 sums). The first entry whose words all stand in a device's name holds, so "H100 NVL"
# comes before "H100".
# From NVIDIA: data sheets of H100 (SXM, PCIe, NVL), H200 (SXM, NVL), GH200, A100, A10, A40,
# L4, L40S; white papers "Ada" (RTX 4090, RTX 6000 Ada) and "RTX Blackwell" (RTX 5090).
# Sheets from Hopper on print the figures of sparse matrices, which are halved here.
_PEAKS: dict[str, tuple[float, float, float]] = {
    "B200": (80, 1125, 2250),
    "GH200": (67, 494.5, 989),
    "H200 NVL": (60, 417.5, 835.5),
    "H200": (67, 494.5, 989),
    "H100 NVL": (60, 417.5, 835.5),
    "H100 PCIe": (51, 378, 756),
    "H100": (67, 494.5, 989),
    "A100": (19.5, 156, 312),
    "A40": (37.4, 74.8, 149.7),
    "L40S": (91.6, 183, 362),
    "A10G": (31.5, 35, 70),
    "A10": (31.2, 62.5, 125),
    "L4": (30.3, 60, 121),
    "RTX 6000 Ada": (91.1, 182.1, 364.2),
    "RTX 5090": (104.8, 104.8, 209.5),
    "RTX 4090": (82.6, 82.6, 165.2),
}
# Parts of a chip, or a smaller chip under the same name: their peaks are not the ones above.
_LESSER = frozenset({"MIG", "Laptop", "D", "Max"})
_COLUMNS: dict[Precision, int] = {"fp32": 0, "tf32": 1, "half": 2}


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Floating-point operations per second of one device at best; None where it is not known.

    `device_name` is what `torch.cuda.get_device_name` says.
    """
    words = device_name.replace("-", " ").split()
    if not _LESSER.isdisjoint(words):
        return None
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
