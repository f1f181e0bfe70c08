"""Precision, accumulation and the knobs of FSDP2, DDP, compile and activation checkpointing.

Each dataclass becomes an `accelerate` or torch object at run time, in `parallel_engine`; here they
are plain data, so that reading a config needs neither library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from parallel_config.errors import Problem, report
from parallel_config.options import option

MixedPrecision = Literal["no", "bf16", "fp16"]
ReduceDtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class GradientAccumulationConfig:
    """How many micro-batches make one optimizer update."""

    steps: int = 1
    """Micro-batches per rank and optimizer update."""
    sync_each_batch: bool = False
    """Reduce gradients after every micro-batch instead of after the last of an update: more
    communication, but sharded ranks then keep only their shards of them in between."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            report(
                [
                    Problem(
                        "accelerator.gradient_accumulation.steps",
                        f"= {self.steps}, but it must be at least 1.",
                        f"Use {option('accelerator.gradient_accumulation.steps', '1 or more')}.",
                    )
                ]
            )


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Knobs of FSDP2; in force when dp_shard is above 1."""

    wrap_modules: tuple[str, ...] | None = None
    """Class names of the modules that become wrap units (separated by spaces). None uses the
    model's `_fsdp_wrap_modules`."""
    min_num_params: int | None = None
    """Instead of class names: every module of at least this many parameters becomes a wrap
    unit."""
    reshard_after_forward: bool = True
    """Free a unit's gathered weights between forward and backward: less memory, one more
    all-gather."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory between uses."""
    ignored_modules: tuple[str, ...] = ()
    """Names (FQNs) of modules left unsharded; their gradients are still averaged over ranks."""
    # fp32 under bf16 too, which is more exact: accelerate's own bf16 reduces in bf16.
    reduce_dtype: ReduceDtype = "fp32"
    """Dtype in which gradients are reduced."""

    def __post_init__(self) -> None:
        for name in ("wrap_modules", "ignored_modules"):
            _freeze(self, name)
        report(self._problems())

    def _problems(self) -> Iterator[Problem]:
        if self.wrap_modules is not None and self.min_num_params is not None:
            yield Problem(
                "accelerator.fsdp.wrap_modules",
                f"= {list(self.wrap_modules)} and accelerator.fsdp.min_num_params = "
                f"{self.min_num_params} exclude each other.",
                f"Give only one of {option('accelerator.fsdp.wrap_modules')} and "
                f"{option('accelerator.fsdp.min_num_params')}.",
            )
        if self.wrap_modules is not None and not self.wrap_modules:
            yield Problem(
                "accelerator.fsdp.wrap_modules",
                "= [] does not name a module class, so nothing below the root would be sharded.",
                "Name at least one class, or leave it out to use the model's _fsdp_wrap_modules.",
            )
        if self.min_num_params is not None and self.min_num_params < 1:
            yield Problem(
                "accelerator.fsdp.min_num_params",
                f"= {self.min_num_params}, but it must be at least 1.",
                f"Use {option('accelerator.fsdp.min_num_params', '1 or more')}.",
            )
        for name in ("wrap_modules", "ignored_modules"):
            for item in getattr(self, name) or ():
                shown = " ".join(part for part in item.split(",") if part.strip()) or "Block"
                # accelerate's own variable wants commas, so people type them here too.
                if "," in item or not item.strip():
                    yield Problem(
                        f"accelerator.fsdp.{name}",
                        f"= {list(getattr(self, name))} contains {item!r}, which is not a name.",
                        f"Separate names by spaces: {option(f'accelerator.fsdp.{name}', shown)}.",
                    )


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """Knobs of DistributedDataParallel; in force when only dp_replicate is above 1."""

    find_unused_parameters: bool = False
    """Allow parameters without a part in a step's loss; DDP then walks the graph at each step."""
    static_graph: bool = False
    """Promise that the same parameters are used in every step, which enables optimisations."""
    bucket_cap_mb: int = 25
    """Size of the gradient buckets that are reduced while the backward pass runs, in MiB."""
    gradient_as_bucket_view: bool = True
    """Let gradients live inside the buckets: saves one copy of the gradients."""
    broadcast_buffers: bool = True
    """Send rank 0's buffers to all ranks before each forward pass."""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb < 1:
            report(
                [
                    Problem(
                        "accelerator.ddp.bucket_cap_mb",
                        f"= {self.bucket_cap_mb}, but it must be at least 1 (MiB).",
                        f"Use {option('accelerator.ddp.bucket_cap_mb', '25')}.",
                    )
                ]
            )


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Regional `torch.compile`: each wrap unit is compiled by itself."""

    enable: bool = False
    """Compile the wrap units."""
    backend: str = "inductor"
    """Backend of `torch.compile` (inductor, aot_eager, eager ...)."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of the inductor backend."""
    fullgraph: bool = False
    """Fail instead of falling back to eager where the graph breaks."""
    dynamic: bool | None = None
    """Compile for any input shape (true), for each shape (false), or let torch decide (None)."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Trade compute for memory by recomputing activations in the backward pass."""

    mode: Literal["none", "full", "selective"] = "none"
    """none; full: every wrap unit; selective: every `every`-th wrap unit."""
    every: int = 2
    """With mode selective: one wrap unit in this many is checkpointed."""

    def __post_init__(self) -> None:
        if self.every < 1:
            report(
                [
                    Problem(
                        "accelerator.activation_checkpointing.every",
                        f"= {self.every}, but it counts wrap units from 1.",
                        f"Use {option('accelerator.activation_checkpointing.every', '2')}.",
                    )
                ]
            )


@dataclass(frozen=True, kw_only=True)
class AcceleratorConfig:
    """Everything that decides how a step is computed, apart from the degrees."""

    mixed_precision: MixedPrecision = "no"
    """Compute dtype of forward and backward; parameters and optimizer stay in fp32."""
    gradient_accumulation: GradientAccumulationConfig = field(
        default_factory=GradientAccumulationConfig
    )
    """Micro-batches per optimizer update."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Knobs of FSDP2."""
    ddp: DDPConfig = field(default_factory=DDPConfig)
    """Knobs of DDP."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """Regional torch.compile."""
    activation_checkpointing: ActivationCheckpointingConfig = field(
        default_factory=ActivationCheckpointingConfig
    )
    """Recomputing activations in the backward pass."""
    tf32: bool | None = None
    """Allow TensorFloat-32 in fp32 matrix products and convolutions on CUDA. None: a command
    allows it unless deterministic is on, and an engine alone leaves the process as it is."""
    cudnn_benchmark: bool | None = None
    """Let cuDNN time its algorithms and pick the fastest; the choice may differ between runs. None
    is as for tf32."""
    deterministic: bool = False
    """Use deterministic algorithms only; needed for bit-exact resume on CUDA and of DDP."""

    def __post_init__(self) -> None:
        if self.deterministic and self.cudnn_benchmark:
            report(
                [
                    Problem(
                        "accelerator.cudnn_benchmark",
                        "= true contradicts accelerator.deterministic = true: timed choices of "
                        "algorithms differ between runs.",
                        f"Use {option('accelerator.cudnn_benchmark', off=True)}.",
                    )
                ]
            )

    def decided(self, *, on_cuda: bool) -> AcceleratorConfig:
        """What a command runs: switches that were left open are on where they speed up a run.

        That is on CUDA, and not where `deterministic` is asked for.
        """
        fast = on_cuda and not self.deterministic
        return replace(
            self,
            tf32=fast if self.tf32 is None else self.tf32,
            cudnn_benchmark=fast if self.cudnn_benchmark is None else self.cudnn_benchmark,
        )


def _freeze(config: object, name: str) -> None:
    """Store a sequence field as a tuple, so that equal configs compare equal."""
    value = getattr(config, name)
    if isinstance(value, list):
        # The dataclass is frozen, and this is still its __post_init__.
        object.__setattr__(config, name, tuple(value))
