"""What every policy config is; torch-free, so that configs parse without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Base of every policy's config. `type` in files and flags names the registered policy."""
