"""`ptrain publish`: a committed checkpoint to the Hub; one process, no ranks."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from parallel_config import ConfigError, Problem, ReportedError
from parallel_train.cli.commands import PublishCommand
from parallel_train.cli.exits import DONE, NOT_PUBLISHED, end_at_once, fail
from parallel_train.cli.parsing import Parsed
from parallel_train.run.signals import StopRequest

if TYPE_CHECKING:
    from parallel_publish import CardInfo, PublishConfig

ANNOUNCEMENT = "exiting as soon as this is safe; send it again to stop at once"
E = TypeVar("E", bound=ReportedError)


def run(parsed: Parsed) -> int:
    """Publish. Returns 0, 3 when it is not on the Hub now (what was made is kept), 2 for wrong
    input.
    """
    command: PublishCommand = parsed.command
    quiet_in_logs()
    try:
        config = config_of(
            repo_id=command.repo_id,
            private=command.private,
            revision=command.revision,
            license=command.license,
            tags=command.tags,
            base_model=command.base_model,
            timeout_s=command.timeout_s,
        )
        if command.resumable:
            return _push(command, config)
        options = {"dtype": command.dtype, "max_shard_size": command.max_shard_size}
        return publish(command.path, config, dry_run=command.dry_run, options=options)
    except ReportedError as error:
        return fail(spoken(error), "ptrain publish")


def config_of(names: Mapping[str, str] = MappingProxyType({}), /, **fields: Any) -> PublishConfig:
    """The `PublishConfig` that flags stand for; `names` as for `spoken`.

    Raises:
        ConfigError: a flag is wrong; it is called what this command calls it.
    """
    from parallel_publish import PublishConfig

    try:
        return PublishConfig(**fields)
    except ConfigError as error:
        raise spoken(error, names) from None


def spoken(error: E, names: Mapping[str, str] = MappingProxyType({})) -> E:
    """The error with the fields of a run's `publish` section called what this command calls them.

    `names` has those whose flag is not the field's name.
    """

    def word(match: re.Match[str]) -> str:
        return match[1] + names.get(match[2], match[2])

    problems = [
        Problem(
            # An empty group first, so that both patterns have the name in group 2.
            re.sub(r"^()publish\.(\w+)$", word, problem.path),
            problem.message,
            re.sub(r"(--)publish\.(\w+)", word, problem.remedy),
        )
        for problem in error.problems
    ]
    return type(error)(problems, source=error.source)


def check_before(config: PublishConfig, names: Mapping[str, str]) -> None:
    """Ask the Hub whether it would take a model, before work goes into one.

    Raises:
        PublishError: it would not, or is out of reach.
    """
    from parallel_publish import Target
    from parallel_publish.preflight import preflight

    try:
        preflight(Target.of(config))
    except ReportedError as error:
        raise spoken(error, names) from None


def quiet_in_logs() -> None:
    """Progress bars are for terminals."""
    if not sys.stderr.isatty():
        from parallel_publish.client import without_bars

        without_bars()


def publish(
    path: str | Path,
    config: PublishConfig,
    *,
    dry_run: bool,
    options: Mapping[str, Any],
    names: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Publish a checkpoint or a folder with a model, say how it went, and give the exit code.

    `names` as for `spoken`.

    Raises:
        ConfigError: there is nothing to publish, or it is damaged.
    """
    from parallel_publish import publish_checkpoint

    # The card is made here: `parallel_publish` does not know policies.
    card = _card(path, str(config.repo_id))
    with StopRequest(announce=ANNOUNCEMENT, on_second=end_at_once) as stop:
        result = publish_checkpoint(
            path, config, card=card, dry_run=dry_run, stop=stop.is_asked, **options
        )
    if result.error is not None:
        result = dataclasses.replace(result, error=spoken(result.error, names))
    print(result.render(), file=sys.stdout if result.ok else sys.stderr)
    return DONE if result.ok else NOT_PUBLISHED


def _card(path: str | Path, repo_id: str) -> CardInfo | None:
    from parallel_ckpt import CheckpointNotFound, resolve_checkpoint
    from parallel_train.hub.card import describe_checkpoint, describe_folder

    try:
        return describe_checkpoint(resolve_checkpoint(path), repo_id)
    except CheckpointNotFound:
        return describe_folder(Path(path).expanduser(), repo_id)


def _push(command: PublishCommand, config: PublishConfig) -> int:
    """Push the whole checkpoint, on its branch."""
    from parallel_ckpt import resolve_checkpoint
    from parallel_publish import PublishError, Target, push_checkpoint_to_hub
    from parallel_publish.preflight import preflight
    from parallel_publish.pushing import push_command

    unused = ("license", "tags", "base_model", "dtype", "max_shard_size")
    # Compared with the defaults: what was not given must not be refused.
    default = PublishCommand(path=command.path, repo_id=command.repo_id)
    given = [name for name in unused if getattr(command, name) != getattr(default, name)]
    if given:
        flags = ", ".join(f"--{name}" for name in given)
        raise ConfigError(
            Problem(
                "resumable",
                f"= True sends the whole checkpoint as it is, without {flags}.",
                f"Leave {flags} out.",
            )
        )
    checkpoint = resolve_checkpoint(command.path)
    # Checkpoints have a branch of their own, unless the user names one.
    target = Target.of_checkpoints(config)
    if command.revision is not None:
        target = Target.of(config)
    if command.dry_run:
        print(f"would push {checkpoint} to {target.repo_id}@{target.revision}")
        return DONE
    try:
        with StopRequest(announce=ANNOUNCEMENT, on_second=end_at_once) as stop:
            preflight(target, stop=stop.is_asked)
            url = push_checkpoint_to_hub(checkpoint, target, stop=stop.is_asked)
    except PublishError as error:
        print(
            f"not pushed: {spoken(error)}\n  retry: {push_command(checkpoint, target)}",
            file=sys.stderr,
        )
        return NOT_PUBLISHED
    print(f"pushed {checkpoint}: {url}")
    return DONE
