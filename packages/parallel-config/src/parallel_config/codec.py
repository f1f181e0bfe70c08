"""Configs to and from text: strict, every problem at once, each with its full path.

JSON and TOML are read, JSON is written. pydantic does the checking of plain dataclasses; what it
does not do is done here: duplicate keys, nearest names, tagged sections, schema versions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_type_hints

from parallel_config.errors import ConfigError, Problem, collect_problems, nearest
from parallel_config.registry import Registry

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")
Document = dict[str, Any]
Migration = Callable[[Document], tuple[Document, list[str]]]
"""Lifts a document by one schema version; returns it with a note for each key it changed."""

VERSION_KEY = "schema_version"
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A config read from text."""

    config: T
    notes: tuple[str, ...] = ()
    """What a migration changed and what was left out, one line each; to be shown to the user."""
    left_out: tuple[str, ...] = ()
    """Paths of keys that this version does not know."""


@dataclass(frozen=True)
class Schema(Generic[T]):
    """How one config class is written: its version, migrations and tagged sections."""

    cls: type[T]
    version: int
    registries: Mapping[str, Registry[Any]] = field(default_factory=dict)
    """Top-level field to the registry of its `type`."""
    migrations: Mapping[int, Migration] = field(default_factory=dict)
    """Version to the function that lifts a document of that version by one."""

    def dump(self, config: T) -> str:
        """JSON text; `from_document(parse(text))` turns it into an equal config."""
        return json.dumps(self.to_document(config), indent=2, allow_nan=False) + "\n"

    def to_document(self, config: T) -> Document:
        """The config as plain JSON values, with its schema version and `type` tags."""
        document: Document = {VERSION_KEY: self.version, **to_plain(config)}
        for name, registry in self.registries.items():
            document[name] = {"type": registry.name_of(getattr(config, name)), **document[name]}
        return document

    def from_document(
        self, document: Document, *, source: str, trusted: bool, leave_out_unknown: bool = False
    ) -> Loaded[T]:
        """Build a config from a parsed document.

        `source` names the document in errors. `trusted` says that the user wrote it: only then may
        a `type` be a `package.module:Class` path. Without a schema version the document counts as
        one of the newest version. With `leave_out_unknown` a key that is not a field is left out
        and named in the notes. That is for documents that a program wrote: there such a key is a
        field of another version, and not a typing error.

        Raises:
            ConfigError: every problem found, with full paths.
        """
        document, notes = self._migrate(document, source)
        problems: list[Problem] = []
        left_out: list[_LeftOut] | None = [] if leave_out_unknown else None
        sections: dict[str, Any] = {}
        for name, registry in self.registries.items():
            if name in document:
                section, found = _load_tagged(registry, name, document.pop(name), trusted, left_out)
                sections[name] = section
                problems.extend(found)
        config, found = _validate(self.cls, document, left_out)
        problems.extend(found)
        if not problems:
            # replace() runs __post_init__ again: fields of different sections are compared there,
            # and only now do all sections have their values.
            with collect_problems() as crossed:
                config = dataclasses.replace(config, **sections)
            problems.extend(crossed)
        if problems:
            raise ConfigError(problems, source=source)
        notes.extend(found.note for found in left_out or ())
        return Loaded(config, tuple(notes), tuple(found.path for found in left_out or ()))

    def _migrate(self, document: Document, source: str) -> tuple[Document, list[str]]:
        document = dict(document)
        version = document.pop(VERSION_KEY, self.version)
        # A bool is an int in Python: `true` would count as version 1.
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ConfigError(
                Problem(VERSION_KEY, f"= {version!r}, but it must be a whole number from 1."),
                source=source,
            )
        if version > self.version:
            raise ConfigError(
                Problem(
                    VERSION_KEY,
                    f"= {version}, but this version reads up to {self.version}.",
                    "The file was written by a newer release: upgrade the packages.",
                ),
                source=source,
            )
        notes: list[str] = []
        for step in range(version, self.version):
            document, added = self.migrations[step](document)
            notes.extend(added)
        return document, notes


def read_config_text(path: Path) -> tuple[str, bool]:
    """Text of a config file and whether it is TOML.

    Raises:
        ConfigError: not readable, too big, not UTF-8, or neither `.json` nor `.toml`.
    """
    name = str(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        raise ConfigError(
            Problem(
                name,
                "is YAML, which is not read: in YAML `no` means false and `1e-3` is a text.",
                "Write the config as .json or .toml.",
            )
        )
    if path.suffix.lower() not in (".json", ".toml"):
        raise ConfigError(Problem(name, "is neither .json nor .toml.", "Rename or convert it."))
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                Problem(name, f"is larger than {MAX_BYTES} bytes, which is too large for a config.")
            )
        # Some editors begin a UTF-8 file with a byte order mark.
        return path.read_text(encoding="utf-8-sig"), path.suffix.lower() == ".toml"
    except UnicodeDecodeError as error:
        raise ConfigError(
            Problem(name, f"is not UTF-8 text: {error.reason}.", "Save it as UTF-8.")
        ) from None
    except OSError as error:
        raise ConfigError(Problem(name, f"cannot be read: {error.strerror}.")) from None


def parse(text: str, *, source: str, toml: bool = False) -> Document:
    """Text to a document of plain values.

    Raises:
        ConfigError: syntax errors with their line, duplicate keys, NaN, or a document that is not a
            mapping.
    """
    if not text.strip():
        raise ConfigError(Problem(source, "is empty.", "An empty config is written as {}."))
    try:
        document = tomllib.loads(text) if toml else _parse_json(text)
    except ConfigError as error:
        raise ConfigError(error.problems, source=source) from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        kind = "TOML" if toml else "JSON"
        raise ConfigError(Problem(source, f"is not valid {kind}: {error}.")) from None
    except RecursionError:
        raise ConfigError(Problem(source, "is nested too deeply for a config.")) from None
    if not isinstance(document, dict):
        raise ConfigError(
            Problem(source, f"holds a {_json_kind(document)}, but a config is a mapping.")
        )
    return document


def to_plain(value: Any) -> Any:
    """Dataclasses, enums, paths and tuples as JSON values.

    Raises:
        ConfigError: a float that JSON cannot hold.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(Problem("", f"{value} cannot be written to JSON."))
    return value


def _parse_json(text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> Document:
        keys = [key for key, _ in items]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError([Problem(key, "is given twice in one mapping.") for key in twice])
        return dict(items)

    def constant(word: str) -> Any:
        raise ConfigError(Problem(word, "is not a JSON number; configs hold finite numbers."))

    return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)


@dataclass(frozen=True)
class _LeftOut:
    """A key of a document that is not a field of this version."""

    path: str
    value: Any
    hint: str

    @property
    def note(self) -> str:
        """The line to show to the user."""
        text = f"{self.path} = {_short(self.value)} is left out"
        return f"{text}: this version does not have this field. {self.hint}".rstrip()


def _load_tagged(
    registry: Registry[Any],
    name: str,
    value: Any,
    trusted: bool,
    left_out: list[_LeftOut] | None,
) -> tuple[Any, list[Problem]]:
    if not isinstance(value, dict):
        return None, [
            Problem(name, f"= {value!r}, but it must be a section (a mapping with a type).")
        ]
    section = dict(value)
    tag = section.pop("type", None)
    if not isinstance(tag, str):
        known = ", ".join(registry.names())
        return None, [Problem(f"{name}.type", f"is missing. Registered: {known}.")]
    try:
        cls = registry.resolve(tag, trusted=trusted)
    except ConfigError as error:
        # Collected, not raised: the problems of other sections are shown with these.
        return None, list(error.problems)
    inner: list[_LeftOut] | None = None if left_out is None else []
    config, problems = _validate(cls, section, inner)
    if left_out is not None:
        below = (dataclasses.replace(found, path=f"{name}.{found.path}") for found in inner or ())
        left_out.extend(below)
    return config, [problem.below(name) for problem in problems]


def _validate(
    cls: type[Any], document: Document, left_out: list[_LeftOut] | None = None
) -> tuple[Any, list[Problem]]:
    """Build `cls` from a document; problems are relative to it.

    With a list, keys that are not fields are moved to it; with None they are problems.
    """
    # Imported here because it takes longer than all the rest of `ptrain --help`.
    from pydantic import TypeAdapter, ValidationError

    # Strict mode takes a list for a tuple and a text for an enum only from JSON.
    try:
        text = json.dumps(document, default=str)
    except RecursionError:
        return None, [Problem("", "is nested too deeply for a config.")]
    with collect_problems() as problems:
        try:
            config = TypeAdapter(cls).validate_json(text, strict=True, extra="forbid")
        except ValidationError as error:
            fitting = document if left_out is None else _leave_out(cls, document, error, left_out)
            if fitting is not document:
                # pydantic stops at an unknown key, so what lies behind it is checked in a new try.
                # Each try has fewer keys than the one before, so this ends.
                return _validate(cls, fitting, left_out)
            return None, [*_flatten(cls, error), *problems]
    return config, problems


def _leave_out(
    cls: type[Any], document: Document, error: ValidationError, left_out: list[_LeftOut]
) -> Document:
    """A document without the keys that are not fields; the given one if all keys are fields."""
    # A deep copy, because keys are taken out of it. TOML dates become texts, as in `_validate`.
    found: Document = json.loads(json.dumps(document, default=str))
    count = len(left_out)
    for loc in dict.fromkeys(d["loc"] for d in error.errors() if d["type"] == _UNKNOWN):
        owner = found
        for part in loc[:-1]:
            if isinstance(owner, dict) and part in owner:  # else a branch of a union
                owner = owner[part]
        path = _path(cls, loc)
        if isinstance(owner, dict) and loc[-1] in owner:
            hint = _unknown_key(cls, loc, path).remedy
            hint = hint if hint.startswith("Did you mean") else ""
            left_out.append(_LeftOut(path, owner.pop(loc[-1]), hint))
    return found if len(left_out) > count else document


_UNKNOWN = "unexpected_keyword_argument"


def _flatten(cls: type[Any], error: ValidationError) -> Iterator[Problem]:
    details = error.errors(include_url=False)
    unknown = {d["loc"] for d in details if d["type"] == _UNKNOWN}
    seen: set[str] = set()
    for detail in details:
        path = _path(cls, detail["loc"])
        if detail["type"] == _UNKNOWN:
            yield _unknown_key(cls, detail["loc"], path)
        # A union gives one error for each branch; only the first is shown.
        elif path not in seen and detail["loc"] not in unknown:
            yield Problem(path, _message(detail))
        seen.add(path)


def _unknown_key(cls: type[Any], loc: tuple[int | str, ...], path: str) -> Problem:
    owner = _class_at(cls, loc[:-1])
    known = [f.name for f in dataclasses.fields(owner)] if owner else []
    hint = nearest(str(loc[-1]), known)
    if not hint:
        hint = _elsewhere(cls, str(loc[-1])) or f"Known here: {', '.join(known)}."
    return Problem(path, "is not a field.", hint)


def _elsewhere(cls: type[Any], key: str) -> str:
    """A hint when another section has a field of that name."""
    for field_ in dataclasses.fields(cls):
        section = _class_at(cls, (field_.name,))
        if section and key in {f.name for f in dataclasses.fields(section)}:
            return f"Did you mean {f'{field_.name}.{key}'!r}?"
    return ""


def _message(detail: Any) -> str:
    found = _short(detail.get("input"))
    context = detail.get("ctx", {})
    kind = detail["type"]
    if kind == "value_error":
        return f"= {found}: {context['error']}"
    if kind in ("literal_error", "enum"):
        return f"= {found}, but it must be one of {context['expected']}."
    if kind == "missing":
        return "is missing."
    text = detail["msg"].removeprefix("Input should be ")
    return f"= {found}, but it should be {text}."


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _path(cls: type[Any], loc: tuple[int | str, ...]) -> str:
    """Pydantic's location without the union branches that it mixes in."""
    parts: list[str] = []
    current: type[Any] | None = cls
    for part in loc:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif current is not None or not parts:
            parts.append(f".{part}" if parts else str(part))
            current = _class_at(current, (part,)) if current else None
    return "".join(parts)


def _class_at(cls: type[Any], loc: tuple[int | str, ...]) -> type[Any] | None:
    """The dataclass that sits at `loc` below `cls`, None if it is not a dataclass."""
    current: type[Any] | None = cls
    for part in loc:
        if current is None or not isinstance(part, str):
            return None
        # Annotations are texts under `from __future__ import annotations`; this makes types of
        # them.
        hint = get_type_hints(current).get(part)
        options = [hint, *get_args(hint)]
        current = next(
            (o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None
        )
    return current


def _json_kind(value: Any) -> str:
    return {list: "list", str: "text", bool: "boolean", type(None): "null"}.get(
        type(value), "number"
    )
