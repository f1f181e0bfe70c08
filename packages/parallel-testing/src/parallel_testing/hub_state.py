"""What the local Hub holds: repositories, users, objects, and the faults that tests ask for."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_REGULAR_BYTES = 2048
"""Larger files and all weights travel as LFS objects, as on the real Hub."""
_BINARY = (".safetensors", ".bin", ".distcp", ".pt", ".parquet", ".png", ".mp4", ".metadata")


@dataclass(frozen=True)
class User:
    """Who a token belongs to."""

    name: str
    can_write: bool = True
    orgs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Blob:
    """One file of a commit."""

    data: bytes
    is_lfs: bool

    @property
    def oid(self) -> str:
        """Git's name of the content."""
        return git_oid(self.data)

    @property
    def sha256(self) -> str:
        """Name of the content as an LFS object."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Commit:
    """A state of a repository."""

    sha: str
    message: str
    files: dict[str, Blob]


@dataclass
class Repo:
    """A repository: branches and tags name commits; the first commit is empty."""

    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)

    def commit(self, message: str, files: dict[str, Blob], branch: str = "main") -> Commit:
        """Add a commit and move the branch to it."""
        # With the time, equal commits of two repositories differ, as those of git do.
        seed = f"{len(self.history)}{message}{time.time_ns()}".encode()
        made = Commit(hashlib.sha1(seed).hexdigest(), message, files)
        self.commits[made.sha] = made
        self.history.append(made.sha)
        self.refs[branch] = made.sha
        return made

    def at(self, revision: str) -> Commit | None:
        """The commit that a branch, tag or sha names."""
        return self.commits.get(self.refs.get(revision, revision))


@dataclass
class Fault:
    """What goes wrong with the next requests that match."""

    path: str
    """Regular expression, searched in the path."""
    method: str = ""
    """Empty: any."""
    status: int = 500
    times: int = 1
    """How many requests it hits."""
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    """Close the connection without an answer."""
    after: bool = False
    """Do what was asked for first: the answer is lost, not the request."""
    delay_s: float = 0.0
    """Answer late and well; `status` and `drop` do not count then."""
    until: threading.Event | None = None
    """The same, once the event is set: for tests that look around meanwhile."""


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str


class HubState:
    """Everything that the Hub knows; tests read and prepare `repos`, `users` and `faults`."""

    endpoint = ""
    """Address of the server, once it listens; answers contain addresses."""

    def __init__(self) -> None:
        self.token = "hf_test_writer"
        self.users: dict[str, User] = {
            self.token: User("user", orgs=("team",)),
            "hf_test_reader": User("user", can_write=False),
            "hf_test_stranger": User("stranger"),
        }
        self.repos: dict[str, Repo] = {}
        """By name: user/name of a model, datasets/user/name of a dataset."""
        self.objects: dict[str, bytes] = {}
        """LFS objects by their sha256."""
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.RLock()
        """Held while a request is answered: the server has a thread for each connection."""

    def create(self, repo_id: str, *, private: bool = False) -> Repo:
        """An empty repository."""
        with self.lock:
            repo = self.repos[repo_id] = Repo(private)
            # As on the Hub: main exists at once, so the first upload has a parent too.
            repo.commit("initial commit", {})
            return repo

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision holds, by path."""
        commit = self.repos[repo_id].at(revision)
        assert commit is not None, f"{repo_id} does not have {revision}"
        return {path: blob.data for path, blob in commit.files.items()}

    def commits(self, repo_id: str) -> list[str]:
        """Messages of all commits but the first, oldest first."""
        repo = self.repos[repo_id]
        # The first is the empty one of `create`.
        return [repo.commits[sha].message for sha in repo.history[1:]]

    def requests_to(self, pattern: str, method: str = "") -> list[Request]:
        """Requests so far whose path matches."""
        return [
            request
            for request in self.requests
            if re.search(pattern, request.path) and method in ("", request.method)
        ]

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault that hits this request, if any; it is one shorter afterwards."""
        with self.lock:
            for fault in self.faults:
                hits = re.search(fault.path, path) and fault.method in ("", method)
                if hits and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


def git_oid(data: bytes) -> str:
    """Name that git gives to a file of this content."""
    # The client compares its own files with this hash before it sends them.
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(path: str, size: int) -> bool:
    """Whether a file travels as an LFS object."""
    return size > MAX_REGULAR_BYTES or path.endswith(_BINARY)


def card_errors(readme: str) -> Iterator[str]:
    """What the Hub refuses in a card's metadata, as far as the faults of a trainer go."""
    match = re.match(r"---\n(.*?)\n---", readme, re.DOTALL)
    if match is None:
        return
    for line in match[1].splitlines():
        key, _, value = line.partition(":")
        item = line.strip().removeprefix("- ").strip()
        if line.strip() in ("-", "- null", "- ~"):
            yield f'"{line.strip()}" must be a string'
        if key == "license" and value.strip().strip('"') in ("null", "", "None"):
            yield '"license" must be one of the known identifiers'
        if key == "base_model" and value.strip().strip('"').startswith(("/", ".")):
            yield f'"base_model" with value {value.strip()} is not valid'
        if item.startswith(('"/', "/")):
            yield f"{item} is not a name on the Hub"
