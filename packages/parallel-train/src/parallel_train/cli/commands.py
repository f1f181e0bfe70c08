"""The commands of `ptrain` and their options. A docstring under a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from parallel_train.config import TrainConfig
from parallel_train.run.job import ResumeMode

PolicyType = Annotated[
    str,
    arg(
        name="policy.type",
        help="Which policy: a registered name, or a path of yours (my_package.module:MyPolicy).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the run is started. This is not part of its config."""

    nproc_per_node: int | None = None
    """Start this many processes on this machine. Under torchrun or Slurm leave it out."""
    grace_s: float = 30.0
    """With --nproc_per_node: seconds that workers have, after SIGTERM, to write a checkpoint."""
    timeout_s: float = 600.0
    """Seconds that ranks wait for each other, at the start and in each collective."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a policy. Without flags: `act` on the embedded dataset, in about a minute."""

    run: Annotated[TrainConfig, arg(name="")] = field(default_factory=TrainConfig)
    policy_type: PolicyType = "act"
    config: Annotated[str | None, arg(metavar="FILE")] = None
    """Read the config from a .json or .toml file; flags override it."""
    print_config: bool = False
    """Print the resulting config as JSON and stop."""
    resume: ResumeMode = "never"
    """never: refuse a folder that holds a run. auto: continue from its newest intact checkpoint, or
    start afresh. must: continue, or fail."""
    allow_batch_change: bool = False
    """On resume: accept a global batch that differs from the checkpoint's."""
    allow_optimizer_change: bool = False
    """On resume: accept an optimizer of another class than the checkpoint's; its state starts
    anew."""
    launch: Annotated[LaunchOptions, arg(name="")] = field(default_factory=LaunchOptions)


@dataclass(frozen=True, kw_only=True)
class ResumeCommand:
    """Continue a run from a checkpoint. Flags change its config from here on."""

    path: Positional[str | None] = None
    """The run folder, a checkpoint in it, or `last`. Leave it out with --from_hub."""
    from_hub: Annotated[str | None, arg(metavar="USER/RUN[@BRANCH]")] = None
    """Fetch the newest complete checkpoint that --publish.push_checkpoints has pushed there, into
    --output_dir, check it, and continue from it."""
    run: Annotated[TrainConfig, arg(name="")] = field(default_factory=TrainConfig)
    policy_type: PolicyType = "act"
    print_config: bool = False
    """Print the resulting config as JSON and stop."""
    allow_batch_change: bool = False
    """Accept a global batch that differs from the checkpoint's."""
    allow_optimizer_change: bool = False
    """Accept an optimizer of another class than the checkpoint's; its state starts anew."""
    launch: Annotated[LaunchOptions, arg(name="")] = field(default_factory=LaunchOptions)


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Show what a run would need on any number of ranks, without starting it and without a GPU."""

    run: Annotated[TrainConfig, arg(name="")] = field(default_factory=TrainConfig)
    policy_type: PolicyType = "act"
    config: Annotated[str | None, arg(metavar="FILE")] = None
    """Read the config from a .json or .toml file; flags override it."""
    world_size: int = 1
    """Number of ranks to plan for."""
    json: bool = False
    """Print JSON for programs."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Measure how often a trained policy solves MetaWorld tasks; compare experts and chance."""

    path: Positional[str]
    """A checkpoint, a run folder, a converted model, or a repository on the Hub."""
    policy_type: Annotated[
        str | None,
        arg(
            name="policy.type",
            help="For a policy that was named by its path in training: that path again.",
        ),
    ] = None
    tasks: tuple[str, ...] = ("reach-v3",)
    """Names of MetaWorld tasks; the policy must have been trained on them."""
    episodes: int = 50
    """Seeded episodes per task."""
    seed: int = 0
    """Seed of the placements of objects. Each seed gives 50 of them per task."""
    max_steps: int = 300
    """Steps after which an episode counts as failed."""
    output: str | None = None
    """Folder for results.json and for animated pictures of a solved and a failed episode. None
    means evaluations/<step> in the run folder, or evaluations/<name> in the current folder."""
    json: bool = False
    """Print JSON for programs."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Draw a run: loss, learning rate, throughput, memory and the numbers of the policy."""

    path: Positional[str]
    """A run folder."""
    output: str | None = None
    """Picture to write; its suffix (.png, .svg, .pdf) gives the format. None writes report.png into
    the run folder."""


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Show what a checkpoint or a whole run holds."""

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
    """Compare sizes only, not checksums."""


@dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Merge DCP shards into a distributable model.safetensors, offline and in one process."""

    path: Positional[str]
    """A checkpoint, its pretrained_model or dcp folder, or a run folder."""
    output: str | None = None
    """Folder to write to; None writes beside the shards."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Dtype of the floating-point weights in the result."""
    max_shard_size: str = "5GB"
    """Size of the largest file. A bigger model is split into several files with an index."""
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
    """A checkpoint, a run folder, or the bundle that an earlier attempt has kept."""
    repo_id: str
    """The repository to publish to, as user/name."""
    private: bool = False
    """Keep the repository private."""
    revision: str | None = None
    """Branch to commit to. None means main, and with --resumable it means checkpoints."""
    resumable: bool = False
    """Send the whole checkpoint with its optimizer state, not only the model. `ptrain resume
    --from_hub` can then continue from it."""
    license: str | None = None
    """Identifier of the licence in the model card, such as apache-2.0."""
    tags: tuple[str, ...] = ()
    """More tags for the model card."""
    base_model: str | None = None
    """Model on the Hub that this one was trained from, as user/name."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Dtype of the published floating-point weights."""
    max_shard_size: str = "5GB"
    """Size of the largest file. A bigger model is split into several files with an index."""
    timeout_s: int = 7200
    """Seconds after which the upload counts as failed. The files that were to be sent are kept."""
    dry_run: bool = False
    """Build and check everything on this machine, but do not send it."""


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Show what this machine can run and what is missing. Exit code 1: training cannot run."""

    output_dir: str = "."
    """Folder that runs will be written to; its disk is tested."""
    dataset: str | None = None
    """Folder of a dataset: everything in it is looked at instead of the machine. Exit code 1: it
    cannot be trained on as it is."""
    json: bool = False
    """Print JSON for programs."""
