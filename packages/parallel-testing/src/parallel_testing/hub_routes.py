"""What each request does to the repositories of the local Hub, and how it is answered."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from typing import Any
from urllib.parse import unquote

from parallel_testing.hub_state import (
    Blob,
    Commit,
    HubState,
    Repo,
    User,
    card_errors,
    git_oid,
    is_large,
)

Json = dict[str, Any]
Headers = Message
"""As `http.server` parses them: names in any case."""


@dataclass(frozen=True)
class Reply:
    """An answer."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    """An error answer, as the real Hub words it."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        # The client chooses the class of its exception by X-Error-Code, not by the status alone.
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply = Reply(json.dumps({"error": message}).encode(), status, headers)


@dataclass(frozen=True)
class Call:
    """A request that was taken apart."""

    hub: HubState
    user: User | None
    parts: dict[str, str]
    body: bytes
    headers: Headers

    @property
    def json(self) -> Json:
        """The body as a document."""
        document: Json = json.loads(self.body)
        return document

    @property
    def key(self) -> str:
        """Name of the repository in `HubState.repos`: "datasets/" stands before a dataset's."""
        kind = self.parts.get("kind", "").strip("/")
        return f"datasets/{self.parts['repo']}" if kind == "datasets" else self.parts["repo"]

    def repo(self, *, write: bool = False) -> Repo:
        """The repository of this request, if the user may see it, or write to it."""
        repo_id = self.parts["repo"]
        repo = self.hub.repos.get(self.key)
        allowed = self.user is not None and _owns(self.user, repo_id.partition("/")[0])
        # A private repository looks like a missing one to a stranger, and without a token both are
        # 401.
        if repo is None or (repo.private and not allowed):
            raise Refused(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if write and not (allowed and self.user and self.user.can_write):
            raise Refused(403, "You don't have the rights to write to this repository")
        return repo

    def commit(self, revision: str | None = None) -> Commit:
        """The commit that the path names."""
        found = self.repo().at(revision or self.parts["rev"])
        if found is None:
            raise Refused(404, "Invalid rev id", "RevisionNotFound")
        return found


def _owns(user: User, namespace: str) -> bool:
    return namespace in (user.name, *user.orgs)


def _reply(document: Json | list[Json], status: int = 200, **headers: str) -> Reply:
    return Reply(json.dumps(document).encode(), status, headers)


def whoami(call: Call) -> Reply:
    if call.user is None:
        raise Refused(401, "Invalid username or password.")
    role = "write" if call.user.can_write else "read"
    orgs = [{"name": name, "type": "org", "roleInOrg": "write"} for name in call.user.orgs]
    token = {"displayName": "test", "role": role}
    return _reply(
        {"type": "user", "name": call.user.name, "orgs": orgs, "auth": {"accessToken": token}}
    )


def create_repo(call: Call) -> Reply:
    document = call.json
    if call.user is None:
        raise Refused(401, "Invalid username or password.")
    # The client sends the namespace apart from the name.
    namespace = document.get("organization") or call.user.name
    repo_id = f"{namespace}/{document['name']}"
    key = f"datasets/{repo_id}" if document.get("type") == "dataset" else repo_id
    if not (_owns(call.user, namespace) and call.user.can_write):
        raise Refused(403, f"You don't have the rights to create a model under {namespace}")
    url = f"{call.hub.endpoint}/{key}"
    if key in call.hub.repos:
        # With exist_ok the client takes this 409 for success.
        return _reply({"error": "You already created this model repo", "url": url}, 409)
    private = document.get("visibility") == "private" or bool(document.get("private"))
    call.hub.create(key, private=private)
    return _reply({"url": url, "name": repo_id, "id": repo_id})


def validate_yaml(call: Call) -> Reply:
    errors = [{"message": message} for message in card_errors(call.json["content"])]
    return _reply({"errors": errors, "warnings": []}, 400 if errors else 200)


def info(call: Call) -> Reply:
    commit = call.commit(call.parts.get("rev") or "main")
    document = {
        "id": call.parts["repo"],
        "modelId": call.parts["repo"],
        "sha": commit.sha,
        "private": call.repo().private,
        "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        "tags": [],
        "downloads": 0,
        "likes": 0,
    }
    return _reply(document)


def refs(call: Call) -> Reply:
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
        for name, sha in call.repo().refs.items()
    ]
    return _reply({"branches": branches, "tags": [], "converts": []})


def tree(call: Call) -> Reply:
    entries: list[Json] = []
    for path, blob in sorted(call.commit().files.items()):
        entry: Json = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid}
        if blob.is_lfs:
            entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 134}
        entries.append(entry)
    return _reply(entries)


def preupload(call: Call) -> Reply:
    call.repo(write=True)
    files = call.commit().files
    answers = []
    for file in call.json["files"]:
        path, size = file["path"], file["size"]
        old = files.get(path)
        # The client leaves a file out of the commit if its own hash is this one. So a commit whose
        # answer was lost is not made twice.
        oid = None if old is None else (old.sha256 if old.is_lfs else old.oid)
        mode = "lfs" if is_large(path, size) else "regular"
        answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return _reply({"files": answers})


def lfs_batch(call: Call) -> Reply:
    call.repo(write=True)
    objects = []
    for wanted in call.json["objects"]:
        oid = wanted["oid"]
        answer: Json = {"oid": oid, "size": wanted["size"]}
        # Without actions the client does not send the object: it is here already.
        if oid not in call.hub.objects:
            href = f"{call.hub.endpoint}/lfs/{oid}"
            answer["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
        objects.append(answer)
    return _reply({"transfer": "basic", "objects": objects})


def lfs_put(call: Call) -> Reply:
    # No user is checked: the client sends no token to this address, which stands for a signed one
    # of the real store.
    blob = Blob(call.body, True)
    if blob.sha256 != call.parts["oid"]:
        raise Refused(400, "content differs from its oid")
    call.hub.objects[blob.sha256] = call.body
    return Reply()


def lfs_verify(call: Call) -> Reply:
    data = call.hub.objects.get(call.parts["oid"])
    if data is None or len(data) != call.json["size"]:
        raise Refused(404, "object was not uploaded")
    return Reply()


def commit(call: Call) -> Reply:
    repo = call.repo(write=True)
    branch = call.parts["rev"]
    parent = call.commit()
    files = dict(parent.files)
    header: Json = {}
    for line in call.body.splitlines():
        entry = json.loads(line)
        key, value = entry["key"], entry["value"]
        if key == "header":
            header = value
        elif key == "file":
            files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
        elif key == "lfsFile":
            if value["oid"] not in call.hub.objects:
                raise Refused(400, f"{value['path']}: LFS object was not uploaded")
            files[value["path"]] = Blob(call.hub.objects[value["oid"]], True)
        elif key == "deletedFile":
            if files.pop(value["path"], None) is None:
                raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        elif key == "deletedFolder":
            prefix = value["path"].rstrip("/") + "/"
            files = {path: blob for path, blob in files.items() if not path.startswith(prefix)}
    # The client names the commit that its list of files was made from. Without this check two
    # writers would silently undo each other.
    if header.get("parentCommit") not in (None, parent.sha):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    made = repo.commit(header.get("summary", ""), files, branch)
    url = f"{call.hub.endpoint}/{call.key}/commit/{made.sha}"
    return _reply({"commitUrl": url, "commitOid": made.sha, "success": True})


def branch(call: Call) -> Reply:
    repo = call.repo(write=True)
    name = call.parts["rev"]
    if name in repo.refs:
        raise Refused(409, "Reference already exists")
    start = json.loads(call.body or b"{}").get("startingPoint", "main")
    repo.refs[name] = call.commit(start).sha
    return _reply({})


def tag(call: Call) -> Reply:
    repo = call.repo(write=True)
    name = call.json["tag"]
    if name in repo.refs:
        raise Refused(409, "Tag already exists")
    repo.refs[name] = call.commit().sha
    return _reply({})


def resolve(call: Call) -> Reply:
    commit = call.commit()
    blob = commit.files.get(call.parts["path"])
    # The client refuses an answer without it: its cache has one folder for each commit.
    headers = {"X-Repo-Commit": commit.sha}
    if blob is None:
        refused = Refused(404, "Entry not found", "EntryNotFound").reply
        return Reply(refused.body, 404, refused.headers | headers)
    etag = blob.sha256 if blob.is_lfs else git_oid(blob.data)
    headers |= {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
    if blob.is_lfs:
        # The real Hub redirects to a store; these tell the object's size and name before that.
        headers |= {"X-Linked-Size": str(len(blob.data)), "X-Linked-Etag": f'"{etag}"'}
    # A download that broke off goes on at the byte where it stopped.
    wanted = re.fullmatch(r"bytes=(\d+)-", call.headers.get("Range") or "")
    if wanted is None:
        return Reply(blob.data, 200, headers)
    start, end = int(wanted[1]), len(blob.data)
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{end}"
    return Reply(blob.data[start:], 206, headers)


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_API = rf"/api/(?P<kind>models|datasets)/{_REPO}"
# The client quotes a revision, so that a branch with slashes is one part of the path.
_REV = r"(?P<rev>[^/]+)"
ROUTES: list[tuple[str, str, Callable[[Call], Reply]]] = [
    ("GET", r"/api/whoami-v2", whoami),
    ("POST", r"/api/repos/create", create_repo),
    ("POST", r"/api/validate-yaml", validate_yaml),
    ("GET", _API, info),
    ("GET", rf"{_API}/revision/{_REV}", info),
    ("GET", rf"{_API}/refs", refs),
    ("GET", rf"{_API}/tree/{_REV}", tree),
    ("POST", rf"{_API}/preupload/{_REV}", preupload),
    ("POST", rf"{_API}/commit/{_REV}", commit),
    ("POST", rf"{_API}/branch/{_REV}", branch),
    ("POST", rf"{_API}/tag/{_REV}", tag),
    ("POST", rf"/(?P<kind>datasets/)?{_REPO}\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]+)", lfs_put),
    ("POST", r"/lfs/(?P<oid>[0-9a-f]+)/verify", lfs_verify),
    ("GET", rf"/(?P<kind>datasets/)?{_REPO}/resolve/{_REV}/(?P<path>.+)", resolve),
]


def answer(hub: HubState, method: str, path: str, headers: Headers, body: bytes) -> Reply:
    """The reply to one request; `path` is without the query."""
    for verb, pattern, act in ROUTES:
        match = re.fullmatch(pattern, path)
        # HEAD is answered like GET; the server leaves the body out.
        if match is None or verb != ("GET" if method == "HEAD" else method):
            continue
        parts = {key: unquote(value) for key, value in match.groupdict().items() if value}
        try:
            call = Call(hub, _user(hub, headers), parts, body, headers)
            with hub.lock:
                return act(call)
        except Refused as refused:
            return refused.reply
    # The text shows which route a newer client expects.
    return Refused(404, f"no such address: {method} {path}").reply


def _user(hub: HubState, headers: Headers) -> User | None:
    given = headers.get("Authorization") or ""
    if not given:
        return None
    user = hub.users.get(given.removeprefix("Bearer "))
    if user is None:
        raise Refused(401, "Invalid credentials in Authorization header")
    return user
