"""A local Hub for each test; the client learns of it before it is imported."""

import pytest

from parallel_publish import Target
from parallel_publish.retry import RetryPolicy
from parallel_testing.hub_fixture import CLIENT_WARNING, local_hub  # noqa: F401
from parallel_testing.leaks import no_leaks  # noqa: F401
from parallel_testing.ranks import preload

preload("parallel_publish.publishing")


def pytest_configure(config):
    """Let the client's own warning pass."""
    config.addinivalue_line("filterwarnings", CLIENT_WARNING)


@pytest.fixture
def target(hub):
    """A repository that may be written, tried again without long waits."""
    return Target(
        repo_id="user/model", token=hub.token, retry=RetryPolicy(base_s=0.05, max_wait_s=1.5)
    )
