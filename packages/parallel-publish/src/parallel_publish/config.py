"""What a run publishes, and where. It is a section of the train config, so it imports neither torch
nor the client of the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from parallel_config import Problem
from parallel_config.errors import nearest, report

# The rules of the Hub for names, and of git for branches, so that a wrong name is found before
# training and not at the end.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?")
_BRANCH = re.compile(r"[^\x00-\x20\x7f~^:?*\[\\./-][^\x00-\x20\x7f~^:?*\[\\]{0,249}")
MAX_NAME = 96
CHECKPOINTS_BRANCH = "checkpoints"
_LICENSES = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bsd bsd-2-clause
    bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0
    cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
    cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1
    eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research
    lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0 openrail++ osl-3.0
    postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma
    grok2-community afl-3.0 artistic-2.0 bsl-1.0 unknown other
"""
LICENSES = frozenset(_LICENSES.split())
"""Identifiers that the Hub accepts in a model card."""


@dataclass(frozen=True, kw_only=True)
class PublishConfig:
    """Whether and where the trained model is published."""

    enable: bool = False
    """Publish the model at the end of the run. Everything is checked before training starts."""
    repo_id: str | None = None
    """Repository on the Hub, as user/name or organization/name. It is created if it does not
    exist."""
    private: bool = False
    """Create the repository as private. If it exists and is public, that is an error. Without this
    flag an existing repository keeps its visibility."""
    revision: str | None = None
    """Branch to write to; None is main. It is created if it does not exist."""
    license: str | None = None
    """Licence identifier for the model card, such as apache-2.0."""
    tags: tuple[str, ...] = ()
    """More tags for the model card."""
    base_model: str | None = None
    """Model on the Hub that this training started from, as user/name."""
    push_checkpoints: bool = False
    """Push every checkpoint in the background, so that `ptrain resume --from_hub` can continue the
    run. Checkpoints go to the branch `checkpoints`, so that the model's branch does not hold
    shards."""
    timeout_s: int = 7200
    """Seconds after which an upload counts as failed. The folder with the files is kept."""

    def __post_init__(self) -> None:
        report(self._problems())

    @property
    def wants_hub(self) -> bool:
        """Whether anything is sent to the Hub; if not, no network call is made."""
        return self.enable or self.push_checkpoints

    @property
    def checkpoints_revision(self) -> str:
        """Branch that whole checkpoints go to."""
        # The branch of checkpoints is never the one of the model: see decision 7.
        if self.revision in (None, "main"):
            return CHECKPOINTS_BRANCH
        return f"{self.revision}-{CHECKPOINTS_BRANCH}"

    def _problems(self) -> Iterator[Problem]:
        if self.wants_hub and self.repo_id is None:
            yield Problem(
                "publish.repo_id", "is missing.", "Use --publish.repo_id user/name to say where."
            )
        if self.repo_id is not None and not is_repo_id(self.repo_id, namespace=True):
            yield Problem(
                "publish.repo_id",
                f"= {self.repo_id!r} is not a name on the Hub: user/name, made of letters, "
                f"digits, '-', '_' and '.', up to {MAX_NAME} characters.",
                "Use --publish.repo_id user/name.",
            )
        if self.revision is not None and (
            # 40 hex digits name a commit, and a commit cannot move to a new state.
            not is_branch(self.revision) or re.fullmatch("[0-9a-f]{40}", self.revision)
        ):
            yield Problem(
                "publish.revision",
                f"= {self.revision!r} is not the name of a branch that can be written to.",
                "Use --publish.revision main, or leave it out.",
            )
        if self.base_model is not None and not is_repo_id(self.base_model):
            yield Problem(
                "publish.base_model",
                f"= {self.base_model!r} is not a name on the Hub, so readers cannot find it.",
                "Use --publish.base_model user/name, or leave it out.",
            )
        if self.license is not None and self.license not in LICENSES:
            yield Problem(
                "publish.license",
                f"= {self.license!r} is not a licence identifier of the Hub.",
                nearest(self.license.lower(), LICENSES) or "Use --publish.license apache-2.0.",
            )
        for tag in self.tags:
            if not isinstance(tag, str) or not tag.strip() or tag != tag.strip() or "\n" in tag:
                yield Problem(
                    "publish.tags",
                    f"contains {tag!r}, which is not a tag.",
                    "Leave it out of the list.",
                )
        if self.timeout_s < 1:
            yield Problem(
                "publish.timeout_s",
                f"= {self.timeout_s}, but it must be at least 1.",
                "Use --publish.timeout_s 7200.",
            )


def is_repo_id(text: str, *, namespace: bool = False) -> bool:
    """Whether `text` can name a repository on the Hub; with `namespace` the user is needed too."""
    parts = text.split("/")
    fits = len(parts) == 2 or (len(parts) == 1 and not namespace)
    return (
        fits
        and len(text) <= MAX_NAME
        and not text.endswith(".git")
        and all(_NAME.fullmatch(part) and "--" not in part and ".." not in part for part in parts)
    )


def is_branch(text: str) -> bool:
    """Whether `text` can name a branch, by git's rules."""
    return (
        _BRANCH.fullmatch(text) is not None
        and not text.endswith((".", "/", ".lock"))
        and not any(part in text for part in ("..", "//", "/.", "@{"))
    )
