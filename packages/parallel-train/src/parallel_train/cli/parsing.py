"""argv to a command: files first, flags over them by presence, every problem at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro
from tyro.conf import AvoidSubcommands, EnumChoicesFromValues, subcommand

from parallel_config import ConfigError, Problem
from parallel_config.codec import Loaded
from parallel_config.errors import collect_problems
from parallel_train.cli import flags as argv_flags
from parallel_train.cli.commands import (
    ConvertCommand,
    DoctorCommand,
    EvaluateCommand,
    InspectCommand,
    PlanCommand,
    PublishCommand,
    ReportCommand,
    ResumeCommand,
    TrainCommand,
    VerifyCommand,
)
from parallel_train.cli.mappings import mappings
from parallel_train.config import TrainConfig, read_config
from parallel_train.policies.registry import POLICIES

if TYPE_CHECKING:
    from parallel_ckpt import StepFolder

COMMANDS: dict[str, type[Any]] = {
    "train": TrainCommand,
    "resume": ResumeCommand,
    "plan": PlanCommand,
    "inspect": InspectCommand,
    "verify": VerifyCommand,
    "convert": ConvertCommand,
    "publish": PublishCommand,
    "evaluate": EvaluateCommand,
    "report": ReportCommand,
    "doctor": DoctorCommand,
}
DESCRIPTION = "Train, resume and distribute policies; one config owns the run."


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A command with what only its spelling tells."""

    command: Any
    argv: tuple[str, ...]
    """The words as given, for starting workers with the same ones."""
    parallelism_given: bool = False
    """Whether a --parallelism flag was present."""
    notes: tuple[str, ...] = ()
    """What reading an older config changed."""


def parse(argv: Sequence[str]) -> Parsed:
    """Read the command line.

    Raises:
        ConfigError: wrong values, files or combinations.
        SystemExit: 0 after --help, 2 after a block that says which flag is wrong.
    """
    name = argv[0] if argv else ""
    words = list(argv[1:])
    default, notes = _default(name, words)
    with collect_problems() as problems:
        command = tyro.cli(
            _command_type(name, default),
            args=[*argv[:1], *argv_flags.normalize(words, _flags(default))],
            prog="ptrain",
            description=DESCRIPTION,
            use_underscores=True,
            config=(AvoidSubcommands, EnumChoicesFromValues),
            registry=mappings(),
        )
    problems.extend(_empty_words(command))
    if problems:
        raise ConfigError(problems)
    return Parsed(
        command=command,
        argv=tuple(argv),
        parallelism_given=argv_flags.is_given(words, "parallelism"),
        notes=notes,
    )


def _command_type(name: str, default: Any) -> Any:
    """The union that tyro sees; only the command that is named needs its real default."""
    options = []
    for known, cls in COMMANDS.items():
        doc = (cls.__doc__ or "").strip()
        chosen = (
            subcommand(known, default=default, description=doc)
            if known == name and default is not None
            else subcommand(known, description=doc)
        )
        options.append(Annotated[cls, chosen])
    return Union[tuple(options)]  # noqa: UP007


def _default(name: str, words: list[str]) -> tuple[Any, tuple[str, ...]]:
    """What the flags go over: a config file, or for `resume` the checkpoint's config."""
    if name in ("train", "plan"):
        cls = COMMANDS[name]
        file = argv_flags.value_of(words, "config")
        if file is None:
            return _with_policy(cls(), words), ()
        _refuse_empty("config", file)
        loaded = read_config(Path(file).expanduser(), trusted=True)
        return _with_policy(cls(run=loaded.config), words), loaded.notes
    if name == "resume":
        path = next(iter(argv_flags.positionals(words, resume_flags())), None)
        if path is None and not {"-h", "--help"} & set(words):
            raise ConfigError(
                Problem(
                    "path",
                    "is missing: what is to be resumed?",
                    "Use `ptrain resume RUN`, or `ptrain resume --from_hub user/run`.",
                )
            )
        if path is None:
            return None, ()
        _refuse_empty("path", path)
        loaded = checkpoint_config(path, words)
        return _with_policy(ResumeCommand(path=path, run=loaded.config), words), loaded.notes
    return None, ()


def _empty_words(command: Any) -> Iterator[Problem]:
    """Problems of a command's own words; those of the run's config are found by the config.

    An empty word mostly comes of a variable that is not set, and as a path it would mean the
    current folder.
    """
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if isinstance(value, str) and not value.strip():
            has_default = field.default is not dataclasses.MISSING
            yield _empty(field.name.replace("policy_type", "policy.type"), value, has_default)


def _refuse_empty(name: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(_empty(name, value))


def _empty(name: str, value: str, has_default: bool = True) -> Problem:
    way = f"Give --{name} a value{', or leave it out' if has_default else ''}."
    return Problem(name, f"= {value!r} is empty.", "Name a folder." if name == "path" else way)


def checkpoint_config(path: str, words: Sequence[str]) -> Loaded[TrainConfig]:
    """The config that a checkpoint was written with.

    Only registered policies resolve, unless the user repeats the path as `--policy.type`.
    """
    repeated = argv_flags.value_of(words, "policy.type")
    return read_config(_config_file(path), trusted=False, repeated_type=repeated)


def _config_file(path: str) -> Path:
    """The config file of the checkpoint that is meant; of a run folder, the newest intact one.

    The other files are checked later; a number that was damaged in this one would go unseen.
    """
    from parallel_ckpt import RunFolder, StepFolder, resolve_checkpoint

    newest = StepFolder(resolve_checkpoint(path))
    run = RunFolder(Path(path).expanduser().absolute())
    if run.checkpoints.is_dir():
        steps = [newest, *(run.step(step) for step in reversed(run.committed_steps()))]
        newest = next(filter(_has_intact_config, steps), newest)
    return newest.train_config


def _has_intact_config(step: StepFolder) -> bool:
    from parallel_ckpt import CheckpointError, read_manifest
    from parallel_ckpt.integrity import file_problems

    try:
        name = step.train_config.relative_to(step.path).as_posix()
        records = [record for record in read_manifest(step).files if record.path == name]
    except CheckpointError:
        return False
    return bool(records) and not list(file_problems(step, records, "full"))


def _with_policy(command: Any, words: Sequence[str]) -> Any:
    """The command with the policy that `--policy.type` names, when it names another one."""
    current = POLICIES.name_of(command.run.policy)
    wanted = argv_flags.value_of(words, "policy.type") or current
    if wanted == current:
        return dataclasses.replace(command, policy_type=current)
    policy = POLICIES.resolve(wanted, trusted=True)()
    run = dataclasses.replace(command.run, policy=policy)
    return dataclasses.replace(command, run=run, policy_type=wanted)


def resume_flags() -> dict[str, int]:
    """Flags of `ptrain resume`, whatever policy it resumes."""
    return _flags(TrainCommand(), ResumeCommand())


def _flags(*commands: Any) -> dict[str, int]:
    """Flags of the commands; the sections that tyro flattens lose their prefix here too."""
    table: dict[str, int] = {}
    for command in commands:
        if command is None:
            command = InspectCommand(path="")
            table |= argv_flags.flag_table(
                command,
                VerifyCommand(path=""),
                ConvertCommand(path=""),
                EvaluateCommand(path=""),
                ReportCommand(path=""),
                PublishCommand(path="", repo_id=""),
                DoctorCommand(),
            )
            continue
        for name, arity in argv_flags.flag_table(command).items():
            table[name.removeprefix("run.").removeprefix("launch.")] = arity
        table["policy.type"] = 1
        table.pop("policy_type", None)
        table.pop("path", None)
    return table
