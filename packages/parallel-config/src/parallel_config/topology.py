"""Topology: the degrees of a run as decided, and where each rank stands in them.

Ranks are laid out row-major over the mesh axes `(dp_replicate, dp_shard)`: the ranks of one
shard group are neighbours (so they share a host where possible), and
`rank = replica * dp_shard + shard`. With data parallelism alone, `dp_rank` is the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What the degrees amount to."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"


class MeshAxis(StrEnum):
    """Names of the device mesh's axes, outermost first."""

    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"


class Coordinates(NamedTuple):
    """Position of a rank: which copy of the weights, and which shard of it."""

    replica: int
    shard: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The decided degrees; their product is the world size."""

    dp_replicate: int = 1
    """Full copies of the weights."""
    dp_shard: int = 1
    """Ranks that one copy of the weights is cut over."""

    def __post_init__(self) -> None:
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

    @property
    def mesh_axes(self) -> tuple[MeshAxis, ...]:
        """Axes of the device mesh, outermost first."""
        return (MeshAxis.DP_REPLICATE, MeshAxis.DP_SHARD)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of `mesh_axes`."""
        return (self.dp_replicate, self.dp_shard)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        self._check(rank)
        return Coordinates(*divmod(rank, self.dp_shard))

    def rank_at(self, replica: int, shard: int) -> int:
        """Inverse of `coordinates`."""
        if not (0 <= replica < self.dp_replicate and 0 <= shard < self.dp_shard):
            raise ValueError(f"no rank at replica {replica}, shard {shard} of {self.describe()}")
        return replica * self.dp_shard + shard

    def dp_rank(self, rank: int) -> int:
        """Which slice of the global batch `rank` reads."""
        self._check(rank)
        return rank

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold, together with `rank`, one copy of the weights."""
        replica, _ = self.coordinates(rank)
        return tuple(self.rank_at(replica, shard) for shard in range(self.dp_shard))

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same shard as `rank`, one in each copy."""
        _, shard = self.coordinates(rank)
        return tuple(self.rank_at(replica, shard) for replica in range(self.dp_replicate))

    def describe(self) -> str:
        """One phrase for logs: `hsdp, dp_replicate=2 x dp_shard=4 = 8 ranks`."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{self.kind}, dp_replicate={self.dp_replicate} x dp_shard={self.dp_shard} = {ranks}"

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not among the {self.world_size} of {self.describe()}")
