"""What a reader of checkpoints is told when one is missing, foreign or damaged."""

from __future__ import annotations

from typing import Self

from parallel_config import ConfigError, Problem


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, found or used as it is; one line per problem."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (_rebuild, (type(self), self.problems, self.source))

    @classmethod
    def of(cls, path: object, message: str, remedy: str = "") -> Self:
        """An error of one line: where, what was found and expected, and the way out."""
        return cls(Problem(str(path), message, remedy))


def _rebuild(
    kind: type[CheckpointError], problems: tuple[Problem, ...], source: str
) -> CheckpointError:
    """Unpickling: an error found by one rank is raised by the others."""
    return kind(problems, source=source)


class CheckpointNotFound(CheckpointError):
    """No committed checkpoint lies where one was looked for."""


class DamagedCheckpoint(CheckpointError):
    """A file differs from what the manifest says of it, or cannot be read as what it should be."""


class StateMismatch(CheckpointError):
    """Model or optimizer and checkpoint do not hold the same tensors."""
