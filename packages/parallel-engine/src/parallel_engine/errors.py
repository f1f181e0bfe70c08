"""The errors that the engine raises while a run is under way. Wrong input is a `ConfigError`."""

from __future__ import annotations


class EngineError(RuntimeError):
    """Base of every error below: catch it to handle a failed update, whatever the reason."""


class NonFiniteError(EngineError):
    """Loss or gradient norm is NaN or infinite. Raised on every rank before the update."""


class UnitOrderError(EngineError):
    """Ranks ran their wrap units in a different order. Raised on every rank before the update."""


class PeerError(EngineError):
    """Another rank failed first. The message quotes its error."""


class UnusedParametersError(EngineError):
    """Trainable parameters took no part in the loss, and DDP was not told so beforehand."""
