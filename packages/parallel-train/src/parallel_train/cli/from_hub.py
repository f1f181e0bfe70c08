"""`ptrain resume --from_hub user/run`: fetch first, then it is an ordinary resume of a folder.

The config that flags go over lies in the checkpoint, so it must be here before flags are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from parallel_config import ConfigError, Problem, ReportedError, is_agreed
from parallel_config.environment import LaunchFacts, check_environment
from parallel_train.cli import flags as argv_flags
from parallel_train.cli.commands import LaunchOptions
from parallel_train.cli.exits import WRONG_INPUT, fail
from parallel_train.cli.launcher import without_flags
from parallel_train.run.folder import default_output_dir

NO_WANDB = "--logging.no-wandb"


def fetched(argv: Sequence[str]) -> list[str]:
    """`argv` with the fetched checkpoint's folder in place of `--from_hub`; else as it is.

    Collective under a launch of several ranks: the main rank fetches, into a folder that all share.
    With --nproc_per_node the launcher does, before there are ranks.

    Raises:
        ConfigError: it is missing or damaged, or the run that is here went further.
        PublishError: the Hub does not give it. For both: ranks of a group leave the process, and
            the main rank says why.
    """
    source = argv_flags.value_of(argv[1:], "from_hub")
    # Help must not fetch.
    if argv[:1] != ["resume"] or source is None or {"-h", "--help"} & set(argv):
        return list(argv)
    # The next flag was taken for the value.
    if source.startswith("--"):
        raise ConfigError(Problem("from_hub", "needs a value.", "Use --from_hub user/run."))
    from parallel_train.cli.parsing import resume_flags

    paths = argv_flags.positionals(argv[1:], resume_flags())
    if paths:
        raise ConfigError(
            Problem(
                "from_hub",
                f"= {source!r}, but {paths[0]!r} is to be resumed as well.",
                "Use one of the two; --output_dir says where to fetch to.",
            )
        )
    check_environment()
    facts = LaunchFacts.read()
    if facts.world_size > 1:
        from parallel_engine import connect

        # By hand: flags are parsed over the config, which is fetched only now.
        timeout_s = argv_flags.value_of(argv[1:], "timeout_s") or LaunchOptions.timeout_s
        connect(timeout=timedelta(seconds=argv_flags.seconds("timeout_s", timeout_s)))
    from parallel_publish.fetching import on_main_at_leisure

    output_dir = argv_flags.value_of(argv[1:], "output_dir")
    try:
        checkpoint = Path(on_main_at_leisure(lambda: str(_fetch(source, output_dir))))
    except ReportedError as error:
        if facts.world_size == 1:
            raise
        from parallel_engine import leave

        if facts.is_main or not is_agreed(error):
            fail(error, "ptrain resume")
        # Without a barrier: an error that is this rank's own has not reached the others.
        leave(WRONG_INPUT, together=False)
    flags = _flags(checkpoint, source)
    if NO_WANDB in flags and facts.is_main and not argv_flags.is_given(argv, "logging.wandb"):
        print(
            "the run was logged to Weights & Biases, but is not logged here: add "
            "--logging.wandb to do so"
        )
    # The user's flags come last, so they win over those that turn things off.
    rest = without_flags(argv[1:], ("from_hub",))
    return [argv[0], str(checkpoint), *flags, *rest]


def _fetch(source: str, output_dir: str | None) -> Path:
    from parallel_ckpt.layout import RunFolder
    from parallel_publish import Target, fetch_checkpoint, newest_on_hub
    from parallel_publish.client import without_bars
    from parallel_publish.config import CHECKPOINTS_BRANCH, is_branch, is_repo_id
    from parallel_publish.hub import at_one_state

    repo_id, at, branch = source.partition("@")
    if not is_repo_id(repo_id, namespace=True) or (at and not is_branch(branch)):
        raise ConfigError(
            Problem(
                "from_hub",
                f"= {source!r} is not a name on the Hub.",
                "Use --from_hub user/run, or user/run@branch.",
            )
        )
    if not sys.stderr.isatty():
        without_bars()
    # The branch may move while files are fetched: all are taken from one commit.
    target = at_one_state(Target(repo_id=repo_id, revision=branch or CHECKPOINTS_BRANCH))
    step, skipped = newest_on_hub(target)
    for line in skipped:
        print(f"skipped {line}", flush=True)
    folder = Path(output_dir or default_output_dir(repo_id.partition("/")[2])).expanduser()
    here = max(RunFolder(folder).committed_steps(), default=-1)
    # Older steps from the Hub must not become the newest of a run that went further here.
    if here > step:
        raise ConfigError(
            Problem(
                "output_dir",
                f"= {str(folder)!r} holds a checkpoint of step {here}, but the newest at {source} "
                f"is of step {step}.",
                f"Continue the run that is here with `ptrain resume {folder}`, or use another "
                "--output_dir.",
            )
        )
    print(f"fetching checkpoint {step} of {source} into {folder}", flush=True)
    return fetch_checkpoint(target, folder, step=step)


def _flags(checkpoint: Path, source: str) -> list[str]:
    """Turn off what writes elsewhere: publishing, but to where the checkpoint came from, and W&B.

    A stranger's config must not make this machine, with its tokens, write to places of theirs.
    """
    try:
        document: Any = json.loads(
            (checkpoint / "pretrained_model" / "train_config.json").read_bytes()
        )
        section = document.get("publish") or {}
        logged = (document.get("logging") or {}).get("wandb")
        same = section.get("repo_id") == source.partition("@")[0]
    except (OSError, ValueError, AttributeError):
        return []  # reading the config for the resume reports it with its place
    # Only what the checkpoint turns on is turned off, so that nothing else shows as changed.
    flags = [NO_WANDB] if logged else []
    if same or not (section.get("enable") or section.get("push_checkpoints")):
        return flags
    return [*flags, "--publish.no-enable", "--publish.no-push_checkpoints"]
