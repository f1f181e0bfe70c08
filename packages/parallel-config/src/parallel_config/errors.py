"""Errors that a person reads, and how several problems are shown in one of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self, TypeVar

E = TypeVar("E", bound=BaseException)


def counted(number: int, noun: str) -> str:
    """A number with a noun whose plural only adds an s: `1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it is, what was found, what is allowed and what to do."""

    path: str
    """Full path of the field (`accelerator.fsdp.wrap_modules`), or a file or variable name."""
    message: str
    """What was found and what is allowed, as a clause that follows the path."""
    remedy: str = ""
    """What to type instead."""

    def __str__(self) -> str:
        head = f"{self.path}{'' if self.message.startswith(':') else ' '}{self.message}"
        return f"{head} {self.remedy}".rstrip()

    def below(self, prefix: str) -> Problem:
        """The same problem, with its path from the document that holds this section at `prefix`."""
        # A config names its full path itself; pydantic gives paths that begin at the section.
        if not prefix or self.path == prefix or self.path.startswith(prefix + "."):
            return self
        return Problem(f"{prefix}.{self.path}" if self.path else prefix, self.message, self.remedy)


class ReportedError(Exception):
    """Base of the errors that a person reads as they are, without a traceback.

    The text has one line per problem, path first. A copy that was pickled has the same class,
    problems and source, so that every rank can raise the error that one rank found.
    """

    def __init__(self, problems: Problem | Iterable[Problem], *, source: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.source = source
        super().__init__(self._text())

    @classmethod
    def of(cls, path: object, message: str, remedy: str = "") -> Self:
        """An error with one problem: where, what was found and expected, and what to do."""
        return cls(Problem(str(path), message, remedy))

    def _text(self) -> str:
        lines = [str(problem) for problem in self.problems]
        if not self.source:
            return "\n".join(lines)
        return f"{self.source}: {counted(len(lines), 'problem')}\n" + "\n".join(
            f"  {line}" for line in lines
        )

    # Exception pickles its arguments, which are the text here: a copy would lose the problems.
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Through a function, because `source` is passed by keyword, and pickle only passes
        # positions.
        return (_rebuild, (type(self), self.problems, self.source))


class ConfigError(ReportedError, ValueError):
    """Wrong input, with every problem that was found."""


def _rebuild(
    kind: type[ReportedError], problems: tuple[Problem, ...], source: str
) -> ReportedError:
    return kind(problems, source=source)


def agreed(error: E) -> E:
    """Mark an error that every rank raises, so that no rank reports it to the others."""
    vars(error)["is_agreed"] = True
    return error


def is_agreed(error: BaseException) -> bool:
    """Whether every rank raises this error."""
    return vars(error).get("is_agreed") is True


_collected: ContextVar[list[Problem] | None] = ContextVar("collected_problems", default=None)


@contextmanager
def collect_problems() -> Iterator[list[Problem]]:
    """Collect the problems of every config that is built inside, so that all are shown together.

    Configs that are built inside may be invalid: look at the list before you use them.
    """
    problems: list[Problem] = []
    token = _collected.set(problems)
    try:
        yield problems
    finally:
        _collected.reset(token)


def report(problems: Iterable[Problem]) -> None:
    """Raise the problems that a config found in itself, or give them to `collect_problems`.

    Raises:
        ConfigError: there is at least one problem, outside of `collect_problems`.
    """
    found = list(problems)
    collector = _collected.get()
    if collector is not None:
        # A config that is built twice, as by replace(), would report each problem twice.
        collector.extend(problem for problem in found if problem not in collector)
    elif found:
        raise ConfigError(found)


def nearest(word: str, known: Iterable[str]) -> str:
    """A "did you mean" clause for `word`, empty if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else ""
