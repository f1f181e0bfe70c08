"""Decides which episodes are trained on and which are held out; torch-free.

The split is a pure function of the config and of the dataset's episodes. It does not depend on the
run's seed, so that runs with other seeds are compared on the same episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel_config import ConfigError, Problem
from parallel_config.errors import report
from parallel_train.data.config import DatasetConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Episodes that are held out of training, and how often their loss is computed. The statistics
    in meta/stats.json include them; --dataset.stats data computes statistics without them.
    """

    fraction: float = 0.0
    """Share of the episodes that is held out. Any share above 0 holds out at least one episode."""
    episodes: tuple[int, ...] | None = None
    """Episodes that are held out, by number, instead of a share."""
    freq: int = 100
    """Optimizer updates between evaluations. The end of the run always has one."""
    max_samples: int | None = None
    """Held-out samples per evaluation, spread evenly over all of them; None takes all."""

    def __post_init__(self) -> None:
        if self.episodes is not None:
            # The dataclass is frozen; a caller may give a list.
            object.__setattr__(self, "episodes", tuple(self.episodes))
        report(self._problems())

    def _problems(self) -> Iterator[Problem]:
        if not 0 <= self.fraction < 1:
            yield Problem(
                "eval.fraction",
                f"= {self.fraction}, but it must be a share of the episodes in [0, 1).",
                "Use --eval.fraction 0.1, or 0 to train on every episode.",
            )
        if self.fraction and self.episodes is not None:
            yield Problem(
                "eval.episodes",
                "and eval.fraction exclude each other.",
                "Set the other one back: --eval.fraction 0, or --eval.episodes None.",
            )
        if self.episodes is not None and not self.episodes:
            yield Problem(
                "eval.episodes", "= [] does not hold out any episode.", "Use --eval.episodes None."
            )
        for name in ("freq", "max_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(
                    f"eval.{name}",
                    f"= {value}, but it must be at least 1.",
                    f"Use --eval.{name} 1.",
                )


@dataclass(frozen=True)
class Split:
    """Numbers of episodes, ascending."""

    trained: tuple[int, ...]
    held_out: tuple[int, ...]


def split_episodes(numbers: Sequence[int], dataset: DatasetConfig, config: EvalConfig) -> Split:
    """Divide the episodes of a dataset.

    Raises:
        ConfigError: a held-out episode is not there or is named for training too, or nothing is
            left to train on.
    """
    chosen = tuple(sorted(numbers if dataset.episodes is None else dataset.episodes))
    held_out = _held_out(chosen, numbers, config)
    # Two lists that the user wrote must not contradict; without the first, all others are trained
    # on.
    if dataset.episodes is not None and config.episodes is not None:
        both = sorted(set(chosen) & set(held_out))
        if both:
            raise ConfigError(
                Problem(
                    "eval.episodes",
                    f"names {both[:10]}, which dataset.episodes trains on.",
                    "Leave them out of one of the two.",
                )
            )
    # Held out of the chosen ones: what is evaluated is never trained on.
    trained = tuple(number for number in chosen if number not in set(held_out))
    if not trained:
        raise ConfigError(
            Problem(
                "eval.episodes" if config.episodes is not None else "eval.fraction",
                f"holds out {len(held_out)} of {len(chosen)} episodes: none is left to train on.",
                "Hold out fewer episodes.",
            )
        )
    return Split(trained, held_out)


def _held_out(chosen: Sequence[int], numbers: Sequence[int], config: EvalConfig) -> tuple[int, ...]:
    if config.episodes is not None:
        unknown = sorted(set(config.episodes) - set(numbers))
        if unknown:
            raise ConfigError(
                Problem(
                    "eval.episodes",
                    f"names {unknown[:10]}, but the dataset has {len(numbers)} episodes, "
                    f"{min(numbers)} to {max(numbers)}.",
                    "Use --eval.episodes with numbers in that range.",
                )
            )
        return tuple(sorted(set(config.episodes)))
    if not config.fraction:
        return ()
    # Neighbours are often alike (one task after another), so the choice is spread over all.
    count = max(1, round(config.fraction * len(chosen)))
    # The middle of each of `count` equal parts.
    return tuple(chosen[(2 * i + 1) * len(chosen) // (2 * count)] for i in range(count))
