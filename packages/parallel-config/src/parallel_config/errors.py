"""The one error a person sees for wrong input, and the way several are reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self, TypeVar

E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True)
class Problem:
    """One wrong thing: where it is, what was found, the rule it breaks and the way out."""

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
        """The same problem seen from the document that holds this section under `prefix`."""
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
        """An error with one problem: where, what was found and expected, and the way out."""
        return cls(Problem(str(path), message, remedy))

    def _text(self) -> str:
        lines = [str(problem) for problem in self.problems]
        if not self.source:
            return "\n".join(lines)
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        return f"{self.source}: {count}\n" + "\n".join(f"  {line}" for line in lines)

    # Exception pickles its arguments, which are the text here: a copy would lose the problems.
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (_rebuild, (type(self), self.problems, self.source))


class ConfigError(ReportedError, ValueError):
    """Wrong input, with every problem that was found."""


def _rebuild(
    kind: type[ReportedError], problems: tuple[Problem, ...], source: str
) -> ReportedError:
    return kind(problems, source=source)


def agreed(error: E) -> E:
    """Mark an error that every rank raises, so that nobody needs to be told of it."""
    vars(error)["is_agreed"] = True
    return error


def is_agreed(error: BaseException) -> bool:
    """Whether every rank raises this error."""
    return vars(error).get("is_agreed") is True


_collected: ContextVar[list[Problem] | None] = ContextVar("collected_problems", default=None)


@contextmanager
def collect_problems() -> Iterator[list[Problem]]:
    """Gather the problems of every config built inside, so that they can be shown together.

    Configs built meanwhile may be invalid: look at the list before using them.
    """
    problems: list[Problem] = []
    token = _collected.set(problems)
    try:
        yield problems
    finally:
        _collected.reset(token)


def report(problems: Iterable[Problem]) -> None:
    """Raise the problems a config found in itself, or hand them to `collect_problems`.

    Raises:
        ConfigError: there is at least one problem and nobody collects.
    """
    found = list(problems)
    collector = _collected.get()
    if collector is not None:
        collector.extend(problem for problem in found if problem not in collector)
    elif found:
        raise ConfigError(found)


def nearest(word: str, known: Iterable[str]) -> str:
    """A "did you mean" clause for `word`, empty when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else ""
