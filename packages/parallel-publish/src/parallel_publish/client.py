"""One conversation with the Hub: its client, its errors in one line each, and trying again."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from parallel_config import Problem
from parallel_publish.errors import PublishError
from parallel_publish.retry import Stop, Stopped, is_offline, never, retried, status_of
from parallel_publish.target import Target

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
ENDPOINT = "HF_ENDPOINT"


def note(line: str) -> None:
    """Write a line for the person who watches, on stderr: stdout is the output of a command."""
    print(line, file=sys.stderr, flush=True)


def without_bars() -> None:
    """Switch the client's progress bars off, unless the user has said what they want."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    # A set variable is final for the client, whatever a program asks of it.
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()


def client(target: Target) -> HfApi:
    """The client. The endpoint is read now: the client itself reads it once, when imported."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint(), token=target.token, library_name="parallel-publish")


def _offline() -> bool:
    from huggingface_hub import constants

    # The client reads this variable once, when it is imported; so the constant decides.
    return bool(constants.HF_HUB_OFFLINE)


def cached_dataset(repo_id: str, revision: str) -> Path:
    """Where the client keeps the files of a dataset at a commit, whether they are there or not."""
    from huggingface_hub import constants

    folder = f"datasets--{repo_id.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE) / folder / "snapshots" / revision


def refuse_setup(target: Target) -> None:
    """Refuse variables of this machine that make a request impossible, before any is sent."""
    from huggingface_hub import get_token

    if _offline():
        raise PublishError.of(
            "HF_HUB_OFFLINE",
            f"is set, so {target.repo_id} cannot be reached.",
            "Unset it.",
        )
    address = endpoint()
    if address is not None and not re.match(r"https?://[^/\s]", address):
        raise PublishError.of(
            ENDPOINT,
            f"= {address!r} is not an address such as https://host.",
            "Change or unset it.",
        )
    # The token becomes a header of every request. The client would fail on such a character only
    # then, and its error could show the token.
    token = target.token or get_token() or ""
    if not re.fullmatch(r"[\x21-\x7e]*", token):
        raise PublishError.of(
            "token",
            "contains spaces or letters that are not allowed in a token.",
            "Copy it again (HF_TOKEN).",
        )


def endpoint() -> str | None:
    """Address of the Hub; None is the client's own. An empty variable counts as not set."""
    return os.environ.get(ENDPOINT, "").strip() or None


TOKEN_REMEDY = "Run `hf auth login`, or set HF_TOKEN to a token with write permission."


def ask(
    target: Target,
    act: Callable[[], T],
    what: str,
    on_note: Callable[[str], None] = note,
    stop: Stop = never,
) -> T:
    """Run requests to the Hub; every error becomes a PublishError of one line."""
    try:
        return retried(act, target.retry, on_note=on_note, describe=_in_short, stop=stop)
    # This error is ours and says already what to change.
    except PublishError:
        raise
    except Stopped:
        raise PublishError.of(
            f"{target.repo_id}@{target.revision}", f"is not {what}: stopped on request."
        ) from None
    except Exception as error:
        raise PublishError(_problem(target, what, error)) from error


def _problem(target: Target, what: str, error: Exception) -> Problem:
    status = status_of(error)
    if is_offline(error) or _offline():
        return Problem(
            "HF_HUB_OFFLINE",
            f"is set, and {target.repo_id}@{target.revision} is not in the client's cache.",
            "Unset it, or fetch the repository once with a connection.",
        )
    remedies = {
        401: TOKEN_REMEDY,
        403: "Use a token that may, or another repository.",
        404: "Check the names of repository and branch, and that the token may see them.",
        409: "Another process works on it; try again.",
        412: "Another process commits to it; try again.",
        413: "Split the weights into smaller files (max_shard_size).",
        429: "Wait some minutes and try again.",
    }
    remedy = remedies.get(status or 0, "Try again later.")
    where = endpoint() or "the Hub"
    return Problem(
        f"{target.repo_id}@{target.revision}",
        f"cannot be {what} at {where}: {_in_short(error)}.",
        remedy,
    )


def _in_short(error: BaseException) -> str:
    """One line, without addresses of requests and without anything a token could be in."""
    # The answer says it in a number. The text of the client holds addresses of requests.
    status = status_of(error)
    if status is not None:
        return f"HTTP {status} ({_MEANING.get(status, 'refused')})"
    # Our own time limit: its text says how long it was.
    if isinstance(error, TimeoutError):
        return str(error)
    # The client wraps the errors of its HTTP library; the innermost one names the reason.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no details'}".rstrip(".")


_MEANING = {
    400: "the request is wrong",
    401: "token missing, wrong or expired",
    402: "payment required",
    403: "the token may not do this",
    404: "not found, or hidden from this token",
    409: "conflict",
    412: "the branch moved meanwhile",
    413: "too large",
    429: "too many requests",
    500: "the server failed",
    502: "the server is unreachable",
    503: "the server is busy",
    504: "the server took too long",
}
