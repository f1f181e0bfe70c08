"""`ptrain convert`: shards to a model that others can load; one process, no process group."""

from __future__ import annotations

from pathlib import Path

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_config import ReportedError
from parallel_train.cli.commands import ConvertCommand
from parallel_train.cli.exits import DONE, FAILED, fail
from parallel_train.cli.parsing import Parsed

PUSH_NAMES = {"repo_id": "push_to_hub"}
"""What `convert` calls the fields of a publish section, where it does not use their name."""


def run(parsed: Parsed) -> int:
    """Convert, and publish where asked for.

    Returns 0, 1 for damage, 2 for wrong input, or 3 for an upload that failed after the conversion.
    """
    try:
        return _convert(parsed.command)
    except DamagedCheckpoint as error:
        fail(error, "ptrain convert")
        # Damage is not wrong input: scripts tell the two apart by the code.
        return FAILED
    except ReportedError as error:
        return fail(error, "ptrain convert")


def _convert(command: ConvertCommand) -> int:
    if command.push_to_hub is not None:  # before the conversion, which may take an hour
        from parallel_train.cli.publish import check_before, config_of

        fields = {"repo_id": command.push_to_hub, "private": command.private}
        check_before(config_of(PUSH_NAMES, **fields), PUSH_NAMES)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from parallel_ckpt.convert import convert

    # To stderr, so that stdout holds the result alone.
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("convert", total=None)
        result = convert(
            command.path,
            output=command.output,
            dtype=command.dtype,
            max_shard_size=command.max_shard_size,
            delete_dcp=command.delete_dcp,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(result.render(), flush=True)
    return DONE if command.push_to_hub is None else _publish(command, result.path)


def _publish(command: ConvertCommand, result: Path) -> int:
    """Publish what was converted: the folder made for it, or the checkpoint it was made in."""
    from parallel_ckpt.layout import StepFolder
    from parallel_train.cli.publish import config_of, publish, quiet_in_logs

    quiet_in_logs()
    inside = StepFolder(result.parent)
    path = inside.path if inside.is_committed else result
    config = config_of(PUSH_NAMES, repo_id=command.push_to_hub, private=command.private)
    return publish(path, config, dry_run=False, options={}, names=PUSH_NAMES)
