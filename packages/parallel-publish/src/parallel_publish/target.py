"""Which repository and branch of the Hub is meant, and how to get in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from parallel_config import ConfigError
from parallel_publish.config import PublishConfig
from parallel_publish.retry import RetryPolicy


@dataclass(frozen=True, kw_only=True)
class Target:
    """A repository, the branch that is meant, and how to get in."""

    repo_id: str
    revision: str = "main"
    repo_type: Literal["model", "dataset"] = "model"
    private: bool | None = None
    """Of a new repository; None is the account's default."""
    token: str | None = field(default=None, repr=False)
    """None: the one that the client finds (HF_TOKEN, or a login)."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    @classmethod
    def of(cls, config: PublishConfig, *, token: str | None = None) -> Target:
        """The target of a config.

        Raises:
            ConfigError: it does not name a repository.
        """
        if config.repo_id is None:
            raise ConfigError.of("publish.repo_id", "is missing.", "Name one, as user/name.")
        return cls(
            repo_id=config.repo_id,
            revision=config.revision or "main",
            # False does not ask for a public repository: the setting of the account decides then.
            private=config.private or None,
            token=token,
            retry=RetryPolicy(timeout_s=config.timeout_s),
        )

    @classmethod
    def of_checkpoints(cls, config: PublishConfig, *, token: str | None = None) -> Target:
        """Where the run's whole checkpoints go.

        Raises:
            ConfigError: the config does not name a repository.
        """
        return replace(cls.of(config, token=token), revision=config.checkpoints_revision)
