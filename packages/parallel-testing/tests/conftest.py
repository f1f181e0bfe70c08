"""Shared by the suite: a local Hub, and a module that the ranks' forkserver imports."""

from parallel_testing.hub_fixture import CLIENT_WARNING, local_hub  # noqa: F401
from parallel_testing.ranks import preload

preload("wave", "a_module_that_is_not_installed", "nor.is.this.one")


def pytest_configure(config):
    """Let the client's own warning pass."""
    config.addinivalue_line("filterwarnings", CLIENT_WARNING)
