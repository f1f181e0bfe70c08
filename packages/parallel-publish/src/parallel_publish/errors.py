"""What goes wrong between here and the Hub, in one line each."""

from __future__ import annotations

from parallel_ckpt import CheckpointError


class PublishError(CheckpointError):
    """Something cannot be published or fetched; nothing that was saved is lost by it."""
