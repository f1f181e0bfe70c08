"""The errors of this package. Each has one line per problem: where, what was found, the remedy."""

from __future__ import annotations

from parallel_config import ConfigError


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, found or used as it is; one line per problem."""


class CheckpointNotFound(CheckpointError):
    """No committed checkpoint lies where one was looked for."""


class DamagedCheckpoint(CheckpointError):
    """A file differs from what the manifest says of it, or cannot be read as what it should be."""


class StateMismatch(CheckpointError):
    """Model or optimizer and checkpoint do not hold the same tensors."""
