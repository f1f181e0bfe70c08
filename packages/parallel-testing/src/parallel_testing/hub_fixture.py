"""The fixture `hub`: a local Hub that the client in this process talks to.

A suite enables it in its conftest.py, or in the one module that needs it:

    from parallel_testing.hub_fixture import local_hub  # noqa: F401
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_testing.hub import HubServer

QUIET = {
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
}
os.environ |= QUIET  # read when the client is imported, which other modules may do before a test
CLIENT_WARNING = "ignore:Use 'content=:DeprecationWarning"
"""Filter for suites whose warnings are errors: the client sends LFS objects in a way that its HTTP
library deprecates."""


@pytest.fixture(name="hub")
def local_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A running Hub with a cache of its own; child processes find it through the environment."""
    from huggingface_hub import close_session, constants

    for name in QUIET:
        # The client may have been imported before QUIET was set. Not every version has each of
        # these names.
        monkeypatch.setattr(constants, name, True, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    with HubServer() as server:
        # The client reads these once, when imported; newer ones also ask for the endpoint.
        files = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        for name, value in {**QUIET, **server.environment}.items():
            monkeypatch.setenv(name, value)
        # Otherwise a child process finds the login of the person who runs the tests.
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield server
        # The end of the server waits for open connections, and the client keeps some.
        close_session()
