"""The three switches that decide whether equal input gives equal bits; applied here alone."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel_config import AcceleratorConfig


def apply_determinism(config: AcceleratorConfig) -> None:
    """Set TF32, cuDNN's timed choice of algorithms and deterministic algorithms where configured.

    They belong to the process: what the config does not decide stays as the process has it.
    """
    if config.tf32 is not None:
        # Not `matmul.allow_tf32`: after this call by anybody, setting that leaves torch in two
        # minds.
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.tf32
    if config.cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
    if config.deterministic:
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        if not torch.are_deterministic_algorithms_enabled():  # the call imports inductor: seconds
            torch.use_deterministic_algorithms(True)
        # cuBLAS reads it when its first handle is made; without it deterministic mode raises.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def fix_buckets(model: nn.Module) -> None:
    """Collective: every rank. Settle DDP's gradient buckets before the first backward.

    Left alone, DDP sorts them anew after the first update of a process. More than two ranks then
    add the same numbers in another order, so that a resumed run, which begins again with unsorted
    ones, would differ from the run that went on in its last bits.
    """
    if isinstance(model, DistributedDataParallel):
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()
