"""The base of what goes wrong between this machine and the Hub."""

from __future__ import annotations

from parallel_config import ReportedError


class PublishError(ReportedError):
    """Something cannot be sent to the Hub or fetched from it now; nothing that was saved is lost.

    The Hub refuses it or does not answer, or this machine cannot reach it or hold the files. It is
    not a `ConfigError`: the input may be right, and the same call may succeed later.
    """
