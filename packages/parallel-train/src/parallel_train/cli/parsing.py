"""argv to a command: files first, flags over them by presence, every problem at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro
from tyro.conf import AvoidSubcommands, EnumChoicesFromValues, subcommand

from parallel_config import ConfigError, Problem
from parallel_config.codec import Loaded, read_config_text
from parallel_config.codec import parse as read_document
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
from parallel_train.cli.hints import stray_words, unknown_flags
from parallel_train.cli.mappings import mappings
from parallel_train.cli.run_defaults import with_run_defaults
from parallel_train.config import SCHEMA, TrainConfig, read_config
from parallel_train.policies.registry import POLICIES

if TYPE_CHECKING:
    from parallel_train.run.saved import SavedRun

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
    in_file: frozenset[str] = frozenset()
    """Dotted paths of the values that `--config FILE` gives."""
    notes: tuple[str, ...] = ()
    """What reading an older config changed."""
    saved: SavedRun | None = None
    """The checkpoint whose config the flags went over, if there was one."""

    def is_in_file(self, path: str) -> bool:
        """Whether the config file gives `path`, or something below it."""
        return any(name == path or name.startswith(f"{path}.") for name in self.in_file)


def parse(argv: Sequence[str]) -> Parsed:
    """Read the command line.

    Raises:
        ConfigError: wrong values, files or combinations.
        SystemExit: 0 after --help, 2 after a block that says which flag is wrong.
    """
    name = argv[0] if argv else ""
    words = list(argv[1:])
    default, notes, saved = _default(name, words)
    flags = _flags(default)
    if name in COMMANDS:
        _refuse_unknown(name, words, flags)
    # tyro stops at the first error; sections report theirs here instead, so that all are shown.
    with collect_problems() as problems:
        command = tyro.cli(
            _command_type(name, default),
            args=[*argv[:1], *argv_flags.normalize(words, flags)],
            prog="ptrain",
            description=DESCRIPTION,
            use_underscores=True,
            config=(AvoidSubcommands, EnumChoicesFromValues),
            registry=mappings(),
        )
    problems.extend(_empty_words(command))
    if problems:
        raise ConfigError(problems)
    in_file = frozenset(_leaves(_document(name, words)))
    if name in ("train", "plan") and saved is None:  # a checkpoint's config says everything
        run, lines = with_run_defaults(
            command.run, lambda path: path in in_file or argv_flags.is_given(words, path)
        )
        command, notes = dataclasses.replace(command, run=run), (*notes, *lines)
    return Parsed(command=command, argv=tuple(argv), in_file=in_file, notes=notes, saved=saved)


def _refuse_unknown(name: str, words: Sequence[str], flags: dict[str, int]) -> None:
    """Flags that do not exist, before tyro: it knows neither our other names nor other tools'.

    Raises:
        ConfigError: one for each of them.
    """
    if {"-h", "--help"} & set(words):
        return
    problems = list(unknown_flags(words, flags, name))
    if not problems and name in ("train", "plan", "resume", "doctor"):
        # The others have a positional that a boolean may stand before.
        problems = list(stray_words(words, flags, allowed=int(name == "resume")))
    if problems:
        raise ConfigError(problems)


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
    # Built from values, which the | of types cannot be.
    return Union[tuple(options)]  # noqa: UP007


def _default(name: str, words: list[str]) -> tuple[Any, tuple[str, ...], SavedRun | None]:
    """What the flags go over: a config file, or for `resume` the checkpoint's config.

    Also lines about it, and the checkpoint.
    """
    if name in ("train", "plan"):
        cls = COMMANDS[name]
        file = argv_flags.value_of(words, "config")
        loaded = Loaded(TrainConfig())
        if file is not None:
            _refuse_empty("config", file)
            _refuse_folder(file)
            loaded = read_config(Path(file).expanduser(), trusted=True)
        saved = None
        if name == "train":
            loaded, saved = _over_checkpoint(loaded, words)
        return _with_policy(cls(run=loaded.config), words), loaded.notes, saved
    if name == "resume":
        path = next(iter(argv_flags.positionals(words, resume_flags())), None)
        if path is None and not {"-h", "--help"} & set(words):
            raise ConfigError(
                Problem(
                    "path",
                    "is missing: name the run to resume.",
                    "Use `ptrain resume RUN`, or `ptrain resume --from_hub user/run`.",
                )
            )
        if path is None:
            return None, (), None
        _refuse_empty("path", path)
        loaded, saved = _saved_at(path, argv_flags.value_of(words, "policy.type"))
        return _with_policy(ResumeCommand(path=path, run=loaded.config), words), loaded.notes, saved
    return None, (), None


def _saved_at(path: str, repeated_type: str | None) -> tuple[Loaded[TrainConfig], SavedRun | None]:
    """The config of the checkpoint that is meant, and the checkpoint, where both are intact.

    Only registered policies resolve, unless the user repeats the path as `--policy.type`.
    """
    from parallel_train.run.saved import SavedRun, find_config

    step, manifest = find_config(path)
    if manifest is None:  # the start of the run says what is damaged, of every checkpoint
        return read_config(step.train_config, trusted=False, repeated_type=repeated_type), None
    saved = SavedRun.read(step, repeated_type=repeated_type, manifest=manifest)
    return saved.loaded, saved


def _document(name: str, words: Sequence[str]) -> dict[str, Any]:
    """What `--config FILE` says, as it stands there; empty without one."""
    file = argv_flags.value_of(words, "config")
    if file is None or name not in ("train", "plan"):
        return {}
    text, toml = read_config_text(Path(file).expanduser())
    return read_document(text, source=file, toml=toml)


def _over_checkpoint(
    given: Loaded[TrainConfig], words: Sequence[str]
) -> tuple[Loaded[TrainConfig], SavedRun | None]:
    """For `train --resume auto|must`: the file's values over the config of the run that is there.

    Only `given` where there is no run yet, or where none of its configs is intact: the start of the
    run tells the user about that.
    """
    folder = argv_flags.value_of(words, "output_dir") or given.config.output_dir
    if argv_flags.value_of(words, "resume") not in ("auto", "must") or not folder:
        return given, None
    from parallel_ckpt import RunFolder
    from parallel_train.run.saved import SavedRun, find_config

    path = Path(folder).expanduser().absolute()
    if not RunFolder(path).committed_steps():
        return given, None
    step, manifest = find_config(str(path))
    if manifest is None:
        return given, None
    own = _document("train", words)
    named = POLICIES.name_of(given.config.policy) if "policy" in own else None
    repeated = argv_flags.value_of(words, "policy.type") or named
    checkpoint = SavedRun.read(step, repeated_type=repeated, manifest=manifest)
    saved = checkpoint.loaded
    # As documents: only they tell which values the file gives and which are defaults.
    below = SCHEMA.to_document(saved.config)
    if "parallelism" in own or argv_flags.is_given(words, "parallelism"):
        # A degree that is given does not go with the other one that was resolved for other ranks.
        below = {**below, "parallelism": SCHEMA.to_document(TrainConfig())["parallelism"]}
    if named not in (None, POLICIES.name_of(saved.config.policy)):
        own = {**own, "policy": SCHEMA.to_document(given.config)["policy"]}
        below = {**below, "policy": own["policy"]}
    merged = _merged(below, own, saved.config)
    loaded = SCHEMA.from_document(merged, source=str(step.train_config), trusted=True)
    return Loaded(loaded.config, (*given.notes, *saved.notes), saved.left_out), checkpoint


def _merged(below: Any, above: Any, section: Any) -> Any:
    """The document of a section with the values above it; mappings and other kinds replace."""
    is_section = dataclasses.is_dataclass(section) and isinstance(above, dict)
    if not is_section or above.get("type", below.get("type")) != below.get("type"):
        return above
    parts = {k: _merged(below.get(k), v, getattr(section, k, None)) for k, v in above.items()}
    return {**below, **parts}


def _leaves(document: Any, path: str = "") -> Iterator[str]:
    if not isinstance(document, dict):
        yield path
        return
    for key, value in document.items():
        yield from _leaves(value, f"{path}.{key}" if path else key)


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


def _refuse_folder(file: str) -> None:
    path = Path(file).expanduser()
    if not path.is_dir():
        return
    way = "Name a .json or .toml file."
    if (path / "train_config.json").is_file():
        way = (
            f"Use --config {path / 'train_config.json'} for a new run with its config, or `ptrain "
            f"resume {path}` to go on with it."
        )
    raise ConfigError(Problem("config", f"= {file!r} is a folder.", way))


def _refuse_empty(name: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(_empty(name, value))


def _empty(name: str, value: str, has_default: bool = True) -> Problem:
    way = f"Give --{name} a value{', or leave it out' if has_default else ''}."
    return Problem(name, f"= {value!r} is empty.", "Name a folder." if name == "path" else way)


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
            # Commands without a config. One table serves all of them: a flag that two of them share
            # takes as many values in both.
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
            table["policy.type"] = table.pop("policy_type")
            continue
        for name, arity in argv_flags.flag_table(command).items():
            table[name.removeprefix("run.").removeprefix("launch.")] = arity
        table["policy.type"] = 1
        # It is spelled policy.type, and path has no flag.
        table.pop("policy_type", None)
        table.pop("path", None)
    return table
