"""The degrees that a person asks for, and the one place that turns them into a topology."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from parallel_config.errors import ConfigError, Problem, counted, report
from parallel_config.options import option
from parallel_config.topology import Topology

FILL = -1
"""Degree that takes every rank left over by the other degree."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig:
    """Degrees of context parallelism. Reserved: only 1 is accepted in this version."""

    ring_degree: int = 1
    """Ranks over which ring attention splits one sequence. Reserved, must be 1."""
    ulysses_degree: int = 1
    """Ranks over which all-to-all splits the attention heads. Reserved, must be 1."""

    def __post_init__(self) -> None:
        report(
            Problem(
                f"parallelism.context_parallel.{name}",
                f"= {degree}, but context parallelism is not available in this version.",
                "Leave it at 1.",
            )
            for name, degree in (
                ("ring_degree", self.ring_degree),
                ("ulysses_degree", self.ulysses_degree),
            )
            if degree != 1
        )


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """How the ranks of a launch are arranged. The degrees alone decide the kind of run.

    One process is a single run; several with both degrees left at 1 are DDP; `dp_shard` above 1
    is FSDP2; both above 1 are HSDP.
    """

    dp_replicate: int = 1
    """Full copies of the weights. -1 takes every rank that dp_shard leaves."""
    dp_shard: int = 1
    """Ranks over which one copy of the weights is split. -1 takes every rank that dp_replicate
    leaves."""
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    """Reserved degrees of context parallelism."""

    def __post_init__(self) -> None:
        report(self._problems())

    def _problems(self) -> Iterator[Problem]:
        for name in ("dp_replicate", "dp_shard"):
            degree = getattr(self, name)
            if degree < 1 and degree != FILL:
                yield Problem(
                    f"parallelism.{name}",
                    f"= {degree}, but it must be at least 1, or -1 for all remaining ranks.",
                    f"Use {option(f'parallelism.{name}', '-1 or a positive number')}.",
                )
        if self.dp_replicate == FILL and self.dp_shard == FILL:
            yield Problem(
                "parallelism.dp_replicate",
                "= -1 and parallelism.dp_shard = -1, but only one degree can take the remaining "
                "ranks.",
                f"Give one of {option('parallelism.dp_replicate')} and "
                f"{option('parallelism.dp_shard')} a number.",
            )

    def resolve(self, world_size: int) -> Topology:
        """Decide the topology of a launch of `world_size` ranks; the config stays as it is.

        Raises:
            ConfigError: the degrees cannot make up `world_size`; the message echoes every degree
                and names the flag to change.
        """
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1")
        # Nothing was asked for: every rank then trains on data of its own, which is DDP.
        if (self.dp_replicate, self.dp_shard) == (1, 1):
            return Topology(dp_replicate=world_size)
        if self.dp_shard == FILL:
            self._require_divides("dp_replicate", self.dp_replicate, world_size)
            return Topology(
                dp_replicate=self.dp_replicate, dp_shard=world_size // self.dp_replicate
            )
        if self.dp_replicate == FILL:
            self._require_divides("dp_shard", self.dp_shard, world_size)
            return Topology(dp_replicate=world_size // self.dp_shard, dp_shard=self.dp_shard)
        product = self.dp_replicate * self.dp_shard
        if product != world_size:
            raise ConfigError(self._mismatch(product, world_size))
        return Topology(dp_replicate=self.dp_replicate, dp_shard=self.dp_shard)

    def _require_divides(self, name: str, degree: int, world_size: int) -> None:
        if world_size % degree:
            other = "dp_shard" if name == "dp_replicate" else "dp_replicate"
            raise ConfigError(
                Problem(
                    f"parallelism.{name}",
                    f"= {degree} does not divide the {counted(world_size, 'rank')} of this "
                    f"launch, so parallelism.{other} = -1 does not have a whole value.",
                    f"Use {option(f'parallelism.{name}', _choices(world_size))}, or launch a "
                    f"multiple of {degree} processes.",
                )
            )

    def _mismatch(self, product: int, world_size: int) -> Problem:
        # The remedy keeps one of the degrees that the user chose, if it divides the world size.
        if self.dp_replicate > 1 and world_size % self.dp_replicate == 0:
            fit = option("parallelism.dp_shard", f"{world_size // self.dp_replicate} or -1")
        elif world_size % self.dp_shard == 0:
            fit = option("parallelism.dp_replicate", f"{world_size // self.dp_shard} or -1")
        else:
            one, fill = (
                option("parallelism.dp_replicate", "1"),
                option("parallelism.dp_shard", "-1"),
            )
            fit = f"{one} and {fill}"
        return Problem(
            "parallelism.dp_replicate",
            f"= {self.dp_replicate} x parallelism.dp_shard = {self.dp_shard} makes {product}, "
            f"but this launch has {counted(world_size, 'rank')}.",
            f"Use {fit}, or launch {product} process{'es' if product > 1 else ''}.",
        )


def _choices(world_size: int) -> str:
    divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
    # A large world size has many divisors; a message shows a few.
    shown = divisors if len(divisors) <= 6 else [*divisors[:5], "..."]
    return " or ".join(shown)
