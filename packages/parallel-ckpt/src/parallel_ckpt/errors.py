"""The errors of this package. Each has one line per problem: where, what was found, the remedy."""

from __future__ import annotations

from parallel_config import ConfigError


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, found or used as it is; one line per problem."""

    def _text(self) -> str:
        # Names and values in it may come from a stranger's files.
        return printable(super()._text())


class CheckpointNotFound(CheckpointError):
    """No committed checkpoint lies where one was looked for."""


class DamagedCheckpoint(CheckpointError):
    """A file differs from what the manifest says of it, or cannot be read as what it should be."""


class StateMismatch(CheckpointError):
    """Model or optimizer and checkpoint do not hold the same tensors."""


class RankLost(CheckpointError):
    """Another rank is gone or late, so the ranks can agree on nothing more; each says so itself."""


def printable(text: str) -> str:
    """Text without control characters, which could rewrite what a terminal shows.

    Line ends and tabs stay; anything else that does not print is written as its escape.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )
