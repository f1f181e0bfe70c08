"""Checks with the Hub before anything is sent or trained: token, rights, visibility, card."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from parallel_publish.client import TOKEN_REMEDY, ask, client, refuse_setup
from parallel_publish.errors import PublishError
from parallel_publish.retry import Stop, never
from parallel_publish.target import Target

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFLIGHT_TIMEOUT_S = 120.0
"""Longest wait for a slow Hub: the ranks wait too, and a person before the screen."""


def preflight(target: Target, *, card: str | None = None, stop: Stop = never) -> None:
    """Check name, token, right to write, visibility and card before anything is sent or trained.

    Makes the repository if it does not exist, because that is the only proof of the right to. It
    waits for a slow server, but not as long as an upload may take.

    Raises:
        PublishError: says what to change.
    """
    refuse_setup(target)
    # The deadline of an upload is hours, which no one waits for before training.
    patience_s = min(target.retry.timeout_s, PREFLIGHT_TIMEOUT_S)
    target = replace(target, retry=replace(target.retry, timeout_s=patience_s))

    def check() -> None:
        api = client(target)
        # The token comes first: without the right one the Hub calls a private repository missing.
        _check_token(api, target)
        # Before the repository is made: a card that is refused must not leave an empty one.
        if card is not None:
            check_card(target, card)
        existing = _visibility(api, target)
        if existing is False and target.private:
            raise PublishError.of(
                "publish.private",
                f"= True, but {target.repo_id} exists and is public.",
                "Choose another repository, or make that one private on the Hub first.",
            )
        if existing is None:
            # exist_ok, because another run may have created it since we asked.
            api.create_repo(target.repo_id, private=target.private, exist_ok=True)
        else:
            _check_write_right(api, target)
        _make_branch(api, target)

    ask(target, check, "prepared", stop=stop)


def check_card(target: Target, card: str) -> None:
    """Have the Hub check a model card's metadata; PublishError names what it refuses."""
    try:
        # Private, but create_commit sends every README.md through it. Asking here shows a wrong
        # card before training and not after it.
        client(target)._validate_yaml(card, repo_type="model")
    except ValueError as error:
        raise PublishError.of("model card", f"is refused by the Hub: {error}") from error


def _check_token(api: HfApi, target: Target) -> None:
    from huggingface_hub import get_token

    if (target.token or get_token()) is None:
        raise PublishError.of(
            "token", "is missing: the Hub takes files only from a known user.", TOKEN_REMEDY
        )
    who = api.whoami()
    role = (who.get("auth") or {}).get("accessToken", {}).get("role")
    if role == "read":
        raise PublishError.of(
            "token",
            f"of {who.get('name')!r} may only read, but {target.repo_id} is to be written.",
            TOKEN_REMEDY,
        )
    names = {who.get("name"), *(org.get("name") for org in who.get("orgs") or ())}
    # Only a token with the role "write" may write to all of these namespaces and to no other. A
    # fine-grained one has rights of its own, which only a request to the repository shows.
    if role == "write" and target.repo_id.split("/")[0] not in names:
        raise PublishError.of(
            "publish.repo_id",
            f"= {target.repo_id!r} belongs to neither {who.get('name')!r} nor an organization "
            "of theirs.",
            f"Use {who.get('name')}/{target.repo_id.split('/')[-1]}.",
        )


def _check_write_right(api: HfApi, target: Target) -> None:
    """Ask how a file would be sent: the Hub answers only to those who may write. Sends nothing."""
    from huggingface_hub import CommitOperationAdd

    api.preupload_lfs_files(target.repo_id, [CommitOperationAdd("README.md", b"-")])


def _visibility(api: HfApi, target: Target) -> bool | None:
    """Whether the repository is private; None when there is none."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        # Without the revision, whose branch may not exist yet.
        return bool(api.repo_info(target.repo_id).private)
    except RepositoryNotFoundError:
        return None


def _make_branch(api: HfApi, target: Target) -> None:
    if target.revision == "main" or re.fullmatch(r"[0-9a-f]{40}", target.revision):
        return
    api.create_branch(target.repo_id, branch=target.revision, exist_ok=True)
