"""The settings of the policy. Do not import torch here, so that `ptrain --help` stays fast."""

from collections.abc import Iterator
from dataclasses import dataclass

from parallel_config import Problem
from parallel_config.errors import report
from parallel_train.policies.base import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class MLPConfig(PolicyConfig):
    """A residual network from the state to the next actions."""

    model_class = "my_policies.modeling:MLPPolicy"

    width: int = 128
    """Width of the network."""
    n_layers: int = 3
    """Residual blocks."""
    chunk_size: int = 8
    """Actions predicted at once; all of them are executed."""

    def __post_init__(self) -> None:
        report(self._problems())

    def delta_timestamps(self, fps: float) -> dict[str, list[float]]:
        return {"action": [i / fps for i in range(self.chunk_size)]}

    def normalization(self) -> dict[str, str]:
        return {"observation.": "mean_std", "action": "mean_std"}

    def _problems(self) -> Iterator[Problem]:
        if self.width < 1:
            yield Problem(
                "policy.width",
                f"= {self.width}, but it must be at least 1.",
                "Use --policy.width 1 or more.",
            )
