"""`ptrain publish`: a committed checkpoint to the Hub; one process, no ranks."""

from __future__ import annotations

from parallel_config import ConfigError
from parallel_train.cli.app import fail
from parallel_train.cli.commands import PublishCommand
from parallel_train.cli.parsing import Parsed


def run(parsed: Parsed) -> int:
    """Publish. Returns 0, 1 when the upload failed (what was made is kept), 2 for wrong input."""
    from parallel_publish import PublishConfig, publish_checkpoint

    command: PublishCommand = parsed.command
    try:
        result = publish_checkpoint(
            command.path,
            PublishConfig(
                repo_id=command.repo_id,
                private=command.private or None,  # None leaves an existing repository as it is
                revision=command.revision,
                license=command.license,
                tags=command.tags,
                base_model=command.base_model,
            ),
            dtype=command.dtype,
            max_shard_size=command.max_shard_size,
            dry_run=command.dry_run,
        )
    except ConfigError as error:
        return fail(error, "ptrain publish")
    print(result.render())
    return 0 if result.ok else 1
