"""The three switches that decide whether equal input gives equal bits; applied here alone."""

from __future__ import annotations

import os

import torch

from parallel_config import AcceleratorConfig


def apply_determinism(config: AcceleratorConfig) -> None:
    """Set TF32, cuDNN's timed choice of algorithms and deterministic algorithms as configured."""
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    torch.backends.cudnn.deterministic = config.deterministic
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        # cuBLAS reads it when its first handle is made; without it deterministic mode raises.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
