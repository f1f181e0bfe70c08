"""A local Hub for each test; the client learns of it before it is imported."""

import os

os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}

import pytest

from parallel_publish.hub import Target
from parallel_publish.retry import RetryPolicy
from parallel_testing import ranks
from parallel_testing.hub import HubServer
from parallel_testing.leaks import no_leaks  # noqa: F401

ranks._PRELOAD.extend(
    name
    for name in ("torch.distributed.fsdp", "parallel_publish.publishing")
    if name not in ranks._PRELOAD
)


def pytest_configure(config):
    """The client itself sends LFS objects in a way that its HTTP library deprecates."""
    config.addinivalue_line("filterwarnings", "ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running Hub that the client in this process talks to, with a cache of its own."""
    from huggingface_hub import close_session, constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with HubServer() as server:
        # The client reads these once, when imported; newer ones also ask for the endpoint.
        files = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
        close_session()


@pytest.fixture
def target(hub):
    """A repository that may be written, tried again without long waits."""
    return Target(
        repo_id="user/model", token=hub.token, retry=RetryPolicy(base_s=0.05, max_wait_s=1.5)
    )
