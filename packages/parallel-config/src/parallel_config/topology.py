"""Topology: the decided degrees of a run.

Ranks are laid out row-major over the mesh axes `(dp_replicate, dp_shard)`, so
`rank = replica * dp_shard + shard`. The ranks of one shard group are therefore neighbours, and
share a host where that is possible: they exchange the most. `dp_rank` is the rank as long as data
parallelism is the only kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parallel_config.errors import counted


class Kind(StrEnum):
    """How the ranks work together, as the degrees decide it."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The decided degrees; their product is the world size."""

    dp_replicate: int = 1
    """Full copies of the weights."""
    dp_shard: int = 1
    """Ranks over which one copy of the weights is split."""

    def __post_init__(self) -> None:
        # A ValueError and not a ConfigError: these degrees come from code. Those of a user are
        # checked in ParallelismConfig.
        if self.dp_replicate < 1 or self.dp_shard < 1:
            raise ValueError(
                f"dp_replicate={self.dp_replicate} and dp_shard={self.dp_shard} must both be "
                "at least 1 in a decided topology"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that read different data."""
        # The same today. It stays a name of its own, because kinds of parallelism whose ranks
        # share data would divide it.
        return self.dp_replicate * self.dp_shard

    @property
    def kind(self) -> Kind:
        """Single | ddp | fsdp | hsdp."""
        if self.dp_shard > 1:
            return Kind.HSDP if self.dp_replicate > 1 else Kind.FSDP
        return Kind.DDP if self.dp_replicate > 1 else Kind.SINGLE

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are cut over ranks."""
        return self.dp_shard > 1

    def dp_rank(self, rank: int) -> int:
        """Which slice of the global batch `rank` reads."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not among the {self.world_size} of {self.describe()}")
        # Sharded ranks read different data too: FSDP is data parallel.
        return rank

    def describe(self) -> str:
        """One phrase for logs: `hsdp, dp_replicate=2 x dp_shard=4 = 8 ranks`."""
        ranks = counted(self.world_size, "rank")
        return f"{self.kind}, dp_replicate={self.dp_replicate} x dp_shard={self.dp_shard} = {ranks}"
