"""The commands of `ptrain` and their options. A docstring under a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from parallel_train.config import TrainConfig

ResumeMode = Literal["never", "auto", "must"]

PolicyType = Annotated[
    str,
    arg(
        name="policy.type",
        help="Which policy: a registered name, or a path of yours (my_package.module:MyPolicy).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the run is started; no part of its config."""

    nproc_per_node: int | None = None
    """Start this many processes on this machine. Under torchrun or Slurm leave it out."""
    grace_s: float = 30.0
    """With --nproc_per_node: seconds that workers have, after SIGTERM, to write a checkpoint."""
    timeout_s: float = 600.0
    """Seconds that ranks wait for one another, at the start and in each collective."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a policy. Without flags: `act` on the embedded dataset, in about a minute."""

    run: Annotated[TrainConfig, arg(name="")] = field(default_factory=TrainConfig)
    policy_type: PolicyType = "act"
    config: Annotated[str | None, arg(metavar="FILE")] = None
    """Read the config from a .json or .toml file; flags go over it."""
    print_config: bool = False
    """Print the resulting config as JSON and stop."""
    resume: ResumeMode = "never"
    """never: refuse a folder that holds a run. auto: continue its newest intact checkpoint, or
    start afresh. must: continue, or fail."""
    allow_batch_change: bool = False
    """On resume: accept a global batch other than the checkpoint's."""
    launch: Annotated[LaunchOptions, arg(name="")] = field(default_factory=LaunchOptions)


@dataclass(frozen=True, kw_only=True)
class ResumeCommand:
    """Continue a run from a checkpoint. Flags change its config from here on."""

    path: Positional[str | None] = None
    """The run folder, a checkpoint in it, or `last`; left out with --from_hub."""
    from_hub: Annotated[str | None, arg(metavar="USER/RUN[@BRANCH]")] = None
    """Fetch the newest complete checkpoint that --publish.push_checkpoints has pushed there, into
    --output_dir, check it, and continue from it."""
    run: Annotated[TrainConfig, arg(name="")] = field(default_factory=TrainConfig)
    policy_type: PolicyType = "act"
    print_config: bool = False
    """Print the resulting config as JSON and stop."""
    allow_batch_change: bool = False
    """Accept a global batch other than the checkpoint's."""
    launch: Annotated[LaunchOptions, arg(name="")] = field(default_factory=LaunchOptions)


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Say what a run would be on any number of ranks, without ranks and without a GPU."""

    run: Annotated[TrainConfig, arg(name="")] = field(default_factory=TrainConfig)
    policy_type: PolicyType = "act"
    config: Annotated[str | None, arg(metavar="FILE")] = None
    """Read the config from a .json or .toml file; flags go over it."""
    world_size: int = 1
    """Ranks to plan for."""
    json: bool = False
    """Print JSON for programs."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Roll a trained policy out in MetaWorld, beside the expert and random actions."""

    path: Positional[str]
    """A checkpoint, a run folder, a converted model, or a repository on the Hub."""
    policy_type: Annotated[
        str | None,
        arg(name="policy.type", help="Repeat the path of a policy that was trained by path."),
    ] = None
    tasks: tuple[str, ...] = ("reach-v3",)
    """MetaWorld tasks, as the embedded dataset has them."""
    episodes: int = 50
    """Seeded episodes per task."""
    seed: int = 0
    """Seed of the placements, 50 for each task: every seed has others."""
    max_steps: int = 300
    """Steps after which an episode counts as failed."""
    output: str | None = None
    """Folder for results.json and for moving pictures of a solved and a failed episode; None is
    evaluations/<step> in the run folder, or evaluations/<name> here."""
    json: bool = False
    """Print JSON for programs."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Draw a run: loss, learning rate, gradient norm and throughput."""

    path: Positional[str]
    """A run folder."""
    output: str | None = None
    """Picture to write, by its suffix (.png, .svg, .pdf); None writes report.png into the run
    folder."""


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Say what a checkpoint, or a whole run, holds."""

    path: Positional[str]
    """A checkpoint or a run folder."""
    json: bool = False
    """Print JSON for programs."""


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Check every file of a checkpoint against its manifest. Exit code 0 means intact."""

    path: Positional[str]
    """A checkpoint, or a run folder (its newest checkpoint)."""
    fast: bool = False
    """Compare sizes only."""


@dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Merge DCP shards into a distributable model.safetensors, offline and in one process."""

    path: Positional[str]
    """A checkpoint, its pretrained_model or dcp folder, or a run folder."""
    output: str | None = None
    """Where to write; None writes beside the shards."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Dtype of the floating-point weights in the result."""
    max_shard_size: str = "5GB"
    """Largest file; bigger models are split with an index."""
    delete_dcp: bool = False
    """Remove the DCP shards once the result has been read back and compared."""
    push_to_hub: Annotated[str | None, arg(metavar="USER/NAME")] = None
    """Publish the result to this repository on the Hugging Face Hub, as `ptrain publish` does."""
    private: bool = False
    """With --push_to_hub: keep the repository private."""


@dataclass(frozen=True, kw_only=True)
class PublishCommand:
    """Publish a checkpoint's model to the Hugging Face Hub, in one commit."""

    path: Positional[str]
    """A checkpoint, a run folder, or the bundle that an earlier try has kept."""
    repo_id: str
    """Where to: user/name."""
    private: bool = False
    """Keep the repository private."""
    revision: str | None = None
    """Branch to commit to; None is main, with --resumable it is checkpoints."""
    resumable: bool = False
    """Send the whole checkpoint, optimizer and all, for `ptrain resume --from_hub`, instead of the
    model."""
    license: str | None = None
    """Identifier of the licence in the model card, such as apache-2.0."""
    tags: tuple[str, ...] = ()
    """Further tags of the model card."""
    base_model: str | None = None
    """Model on the Hub that this one was trained from, as user/name."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Dtype of the published floating-point weights."""
    max_shard_size: str = "5GB"
    """Largest file; bigger models are split with an index."""
    timeout_s: int = 7200
    """Seconds after which the upload counts as failed; what was to be sent is kept."""
    dry_run: bool = False
    """Build and check everything here, send nothing."""


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Say what this machine can run, and what is missing. Exit code 1: training cannot run."""

    output_dir: str = "."
    """Where runs will be written: its disk is tried."""
    json: bool = False
    """Print JSON for programs."""
