"""`inspect`, `verify` and `convert`: one process, no process group, mostly no torch."""

from __future__ import annotations

from pathlib import Path

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_config import ReportedError
from parallel_train.cli.app import fail
from parallel_train.cli.commands import ConvertCommand, InspectCommand, VerifyCommand
from parallel_train.cli.parsing import Parsed

DAMAGED = 1
PUSH_NAMES = {"repo_id": "push_to_hub"}
"""What `convert` calls the fields of a publish section, where it is not their name."""


def run(parsed: Parsed) -> int:
    """Run one of the three. Returns 0, 1 for damage, 2 for wrong input, 3 for an upload that
    failed after the conversion.
    """
    try:
        match parsed.command:
            case InspectCommand() as command:
                return _inspect(command)
            case VerifyCommand() as command:
                return _verify(command)
            case ConvertCommand() as command:
                return _convert(command)
            case _:
                raise AssertionError(f"no offline command: {parsed.command!r}")
    except DamagedCheckpoint as error:
        fail(error, f"ptrain {parsed.argv[0]}")
        return DAMAGED
    except ReportedError as error:
        return fail(error, f"ptrain {parsed.argv[0]}")


def _inspect(command: InspectCommand) -> int:
    from parallel_ckpt.inspect import inspect

    info = inspect(command.path)
    print(info.to_json() if command.json else info.render())
    return 0


def _verify(command: VerifyCommand) -> int:
    from parallel_ckpt.verify import verify

    report = verify(command.path, fast=command.fast)
    print(report.render())
    return 0 if report.ok else DAMAGED


def _convert(command: ConvertCommand) -> int:
    if command.push_to_hub is not None:  # what the Hub would refuse is told before the work
        from parallel_train.cli.publish import check_before, config_of

        fields = {"repo_id": command.push_to_hub, "private": command.private}
        check_before(config_of(PUSH_NAMES, **fields), PUSH_NAMES)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from parallel_ckpt.convert import convert

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
    return 0 if command.push_to_hub is None else _publish(command, result.path)


def _publish(command: ConvertCommand, result: Path) -> int:
    """Publish what was converted: the folder made for it, or the checkpoint it was made in."""
    from parallel_ckpt.layout import StepFolder
    from parallel_train.cli.publish import config_of, publish, quiet_in_logs

    quiet_in_logs()
    inside = StepFolder(result.parent)
    path = inside.path if inside.is_committed else result
    config = config_of(PUSH_NAMES, repo_id=command.push_to_hub, private=command.private)
    return publish(path, config, dry_run=False, options={}, names=PUSH_NAMES)
