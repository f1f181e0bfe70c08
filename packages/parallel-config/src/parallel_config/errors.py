"""The one error a person sees for wrong input, and the way several are reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

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


class ConfigError(ValueError):
    """Wrong input, with every problem found: one line each, path first."""

    def __init__(self, problems: Problem | Iterable[Problem], *, source: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.source = source
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [str(problem) for problem in self.problems]
        if not self.source:
            return "\n".join(lines)
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        return f"{self.source}: {count}\n" + "\n".join(f"  {line}" for line in lines)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (_rebuild, (self.problems, self.source))


def _rebuild(problems: tuple[Problem, ...], source: str) -> ConfigError:
    """Unpickling: an error found by one rank is raised by the others."""
    return ConfigError(problems, source=source)


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
