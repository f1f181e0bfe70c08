"""TrainConfig: everything that decides a run, and how it is written to `train_config.json`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from parallel_config import (
    AcceleratorConfig,
    CheckpointConfig,
    CheckpointFormat,
    EMAConfig,
    OptimizerConfig,
    ParallelismConfig,
    Problem,
    SchedulerConfig,
)
from parallel_config.codec import Loaded, Schema, parse, read_config_text
from parallel_config.errors import report
from parallel_publish.config import PublishConfig
from parallel_train.data.config import DatasetConfig
from parallel_train.data.split import EvalConfig
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.base import PolicyConfig
from parallel_train.policies.registry import POLICIES

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """More sinks besides the console and metrics.jsonl. Each needs an extra of parallel-train."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run folder's `tensorboard` (extra: tensorboard)."""
    wandb: bool = False
    """Log to Weights & Biases (extra: wandb)."""
    wandb_project: str = "parallel"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """User or team in Weights & Biases; None means the account's default."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline keeps everything in the run folder; `wandb sync` sends it later."""
    peak_flops: float | None = None
    """Most floating-point operations per second that one device can do, for the metric `mfu`. None
    takes the number from a table of common NVIDIA GPUs, and leaves mfu out for other devices."""

    def __post_init__(self) -> None:
        # "not <" also refuses NaN.
        if self.peak_flops is not None and not 0 < self.peak_flops < float("inf"):
            report(
                [
                    Problem(
                        "logging.peak_flops",
                        f"= {self.peak_flops}, but it must be a positive finite number.",
                        "Use --logging.peak_flops 989e12, or None.",
                    )
                ]
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run. What is not here cannot change the result."""

    policy: PolicyConfig = field(default_factory=ACTConfig)
    """The model that is trained."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """The demonstrations it is trained on."""
    output_dir: str | None = None
    """Folder of the run. None makes a new one under outputs/, named by time and policy."""
    steps: int = 400
    """Optimizer updates in the whole run."""
    batch_size: int = 32
    """Samples in one micro-batch of one rank. The global batch is this number times dp_replicate
    times dp_shard times accelerator.gradient_accumulation.steps."""
    seed: int = 0
    """Seed of the initial weights, of the data order and of every rank's random numbers."""
    meta_init: bool = False
    """Build the policy without memory and shard it before it has values. No rank then ever holds
    the whole model. The values come from the modules' reset_parameters(), or from the
    checkpoint."""
    log_freq: int = 20
    """Updates between lines on the console; metrics.jsonl has a line for every update."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and the clipping of its gradients."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The learning-rate curve."""
    ema: EMAConfig = field(default_factory=EMAConfig)
    """The average of the weights, if one is kept."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """The loss on episodes that are held out."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Where the numbers go, besides the console and metrics.jsonl."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How the ranks are arranged."""
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    """How a step is computed."""
    checkpoint_format: CheckpointFormat = CheckpointFormat.SAFETENSORS
    """Weight artifacts of a checkpoint."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are written, kept and checked."""
    publish: PublishConfig = field(default_factory=PublishConfig)
    """What goes to the Hugging Face Hub, and where."""

    def __post_init__(self) -> None:
        # A shell does not expand --output_dir=~/runs, nor a path in a file.
        if isinstance(self.output_dir, str) and self.output_dir.startswith("~"):
            object.__setattr__(self, "output_dir", str(Path(self.output_dir).expanduser()))
        report(self._problems())

    def _problems(self) -> Iterator[Problem]:
        if self.output_dir is not None and not self.output_dir.strip():
            yield Problem(
                "output_dir",
                "= '' is not a folder.",
                "Use --output_dir with a path, or leave it out for outputs/<time>_<policy>.",
            )
        for name, least in (("steps", 1), ("batch_size", 1), ("log_freq", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                yield Problem(
                    name,
                    f"= {value}, but it must be at least {least}.",
                    f"Use --{name} {least} or more.",
                )
        # numpy.random.seed takes 32 bits; torch and python would take more.
        if self.seed >= 2**32:
            yield Problem(
                "seed",
                f"= {self.seed}, but numpy's seeds end below 2**32.",
                "Use a smaller --seed.",
            )


SCHEMA: Schema[TrainConfig] = Schema(
    TrainConfig, version=SCHEMA_VERSION, registries={"policy": POLICIES}
)


def read_config(
    file: Path, *, trusted: bool, repeated_type: str | None = None
) -> Loaded[TrainConfig]:
    """Read a `.json` or `.toml` config.

    `trusted` says that the user wrote the file. In a file that came with a checkpoint a policy
    may be named by path only if the user repeated that very path (`repeated_type`), and keys that
    only another version has are left out and named in the notes.

    Raises:
        ConfigError: every problem of the file.
    """
    text, toml = read_config_text(file)
    document = parse(text, source=str(file), toml=toml)
    policy = document.get("policy")
    # A file may hold anything here; the schema reports it with its path.
    named = policy.get("type") if isinstance(policy, dict) else None
    return SCHEMA.from_document(
        document,
        source=str(file),
        trusted=trusted or (named is not None and named == repeated_type),
        leave_out_unknown=not trusted,  # a slip in the user's own file is an error
    )
