"""Trying again where that helps: back-off, the server's Retry-After, and a limit on all of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Stop = Callable[[], bool]
"""Asked now and then: whether to leave. Once true it stays so."""
POLL_S = 0.05
RETRIED_STATUS = frozenset({408, 412, 425, 429, 500, 502, 503, 504})
"""Answers after which the same request may succeed. 412: another process has committed."""


class Stopped(Exception):
    """`stop` was true; a request that is under way ends by itself."""


def never() -> bool:
    """The `stop` that is never true."""
    return False


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how long an upload is tried."""

    attempts: int = 5
    base_s: float = 2.0
    """Wait before the second attempt; it doubles from there."""
    max_wait_s: float = 300.0
    """Longest wait, also where the server asks for more."""
    timeout_s: float = 7200.0
    """Seconds for everything together."""

    def wait_s(self, attempt: int, asked_s: float | None) -> float:
        """Seconds to wait after the failed attempt of this number, counted from 1."""
        # The random factor keeps runs that failed together from returning together.
        wait = self.base_s * 2.0 ** (attempt - 1) * random.uniform(0.8, 1.2)
        return float(min(max(wait, asked_s or 0.0), self.max_wait_s))


def retried(
    act: Callable[[], T],
    policy: RetryPolicy,
    *,
    on_note: Callable[[str], None],
    describe: Callable[[BaseException], str],
    stop: Stop = never,
) -> T:
    """Call `act` until it succeeds, an error is final, the policy ends, or `stop` says so.

    It runs in a thread of its own, because a server that never answers would hold this one.

    Raises:
        TimeoutError: `timeout_s` went by.
        Stopped: `stop` was true.
        Exception: the last error of `act`.
    """
    deadline = time.monotonic() + policy.timeout_s
    for attempt in range(1, policy.attempts + 1):
        try:
            return within(act, deadline - time.monotonic(), policy.timeout_s, stop)
        except Exception as error:
            if attempt == policy.attempts or not is_transient(error):
                raise
            if stop():
                raise Stopped from error
            wait = policy.wait_s(attempt, retry_after_s(error))
            # The last error says more than a time limit that was exceeded while waiting.
            if time.monotonic() + wait > deadline:
                raise
            on_note(
                f"hub: {describe(error)}; attempt {attempt + 1} of {policy.attempts} "
                f"in {wait:.1f} s"
            )
            _sleep(wait, stop)
    raise AssertionError("no attempt was made")


def _sleep(seconds: float, stop: Stop) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if stop():
            raise Stopped
        time.sleep(min(left, POLL_S))


def within(act: Callable[[], T], left_s: float, limit_s: float, stop: Stop = never) -> T:
    """The result of `act`, which is left to itself once the time is over or `stop` is true.

    Raises:
        TimeoutError: it took longer.
        Stopped: `stop` was true.
    """
    if stop():
        raise Stopped
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(act())
        except Exception as error:
            errors.append(error)

    # A daemon: a request without an answer must not keep the process from ending.
    thread = threading.Thread(target=run, name="hub-request", daemon=True)
    thread.start()
    deadline = time.monotonic() + left_s
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        # The wait is short, because `stop` is asked, and not signalled.
        thread.join(min(left, POLL_S))
        if thread.is_alive() and stop():
            raise Stopped
    # An answer that came just at the deadline counts.
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return results[0]


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: the network, or an answer that says so."""
    # An answer decides alone, even if a broken connection stands behind it.
    status = status_of(error)
    if status is not None:
        return status in RETRIED_STATUS
    if isinstance(error, TimeoutError):
        return False  # our own limit
    # By name, like the others: it is a ConnectionError, of a connection that the user forbade.
    if is_offline(error):
        return False
    return any(_is_network(found) for found in _causes(error))


def status_of(error: BaseException) -> int | None:
    """HTTP status of the answer that the error stands for, None when there was no answer."""
    for found in _causes(error):
        response = getattr(found, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(status, int):
            return status
    return None


def retry_after_s(error: BaseException) -> float | None:
    """Seconds that the server asked to wait."""
    for found in _causes(error):
        headers: Any = getattr(getattr(found, "response", None), "headers", None)
        if headers is None:
            continue
        try:
            # The header may also be a date; then our own back-off counts.
            return float(headers.get("Retry-After"))
        except (TypeError, ValueError):
            return None
    return None


def is_offline(error: BaseException) -> bool:
    """Whether the client refused to connect because HF_HUB_OFFLINE is set."""
    return any(type(found).__name__ == "OfflineModeIsEnabled" for found in _causes(error))


def _is_network(error: BaseException) -> bool:
    """The client's transport errors, by name: its HTTP library changes between versions."""
    # Connection errors of the client do not derive from those of Python.
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError) or "TransportError" in names


def _causes(error: BaseException) -> Iterator[BaseException]:
    # Chains of causes can be circles.
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
