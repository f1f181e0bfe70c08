"""Measures success rates of a policy in MetaWorld, beside the expert and a random policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from parallel_config import ConfigError, Problem
from parallel_train.data.spec import STATE, DataSpec
from parallel_train.policies.processors import Postprocessor, Preprocessor
from parallel_train.sim.metaworld import (
    NUM_OBSERVED,
    PLACEMENTS,
    TASKS,
    Controller,
    Rollout,
    Simulator,
    Vector,
    expert,
    random_controller,
)


@dataclass(frozen=True)
class SuccessRate:
    """Solved episodes of one controller on one task."""

    task: str
    controller: str
    """policy, expert or random."""
    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        """Solved episodes, as a fraction."""
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95% Wilson interval of the rate."""
        return wilson(self.successes, self.episodes)

    def to_plain(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {**dataclasses.asdict(self), "rate": self.rate, "interval_95": list(self.interval)}

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.task:<16} {self.controller:<7} {self.successes:>3}/{self.episodes:<3} "
            f"{self.rate:6.1%}  (95%: {low:.1%} to {high:.1%})"
        )


@dataclass(frozen=True)
class Played:
    """One episode that was rolled out."""

    task: str
    controller: str
    """policy, expert or random."""
    number: int
    rollout: Rollout


class Actor(Protocol):
    """A policy that can be asked for one action after another."""

    def eval(self) -> object:
        """Switch dropout and the like off."""
        ...

    def select_action(self, batch: dict[str, Any]) -> Tensor:
        """The action [B, A] to execute now."""
        ...

    def reset(self) -> None:
        """Begin a new episode."""
        ...


class PolicyController:
    """Lets a policy act on MetaWorld observations.

    Args:
        policy: has `select_action(batch) -> [1, A]` and `reset()`; it is put into eval mode.
        preprocessor: the one saved with the policy.
        task_index: of the task, in the dataset that the policy was trained on.
    """

    def __init__(
        self, policy: Actor, preprocessor: Preprocessor, task_index: int, device: torch.device
    ) -> None:
        policy.eval()
        self._policy, self._preprocessor, self._device = policy, preprocessor, device
        self._postprocessor: Postprocessor = preprocessor.postprocessor()
        self._task = torch.tensor([task_index])

    def reset(self) -> None:
        """A new episode begins."""
        self._policy.reset()

    def __call__(self, observation: Vector) -> Vector:
        """The action [4] for an observation [39]."""
        # The dataset's name; the preprocessor renames it for the policy.
        batch = {STATE: torch.from_numpy(observation)[None], "task_index": self._task}
        action_BA = self._policy.select_action(self._preprocessor(batch, self._device))
        action: Vector = self._postprocessor(action_BA)[0].float().cpu().numpy()
        return action


def evaluate_policy(
    policy: nn.Module,
    preprocessor: Preprocessor,
    spec: DataSpec,
    tasks: list[str],
    *,
    episodes: int = 50,
    seed: int = 0,
    max_steps: int = 500,
    on_result: Callable[[SuccessRate], None] = lambda result: None,
    on_episode: Callable[[Played], None] = lambda played: None,
) -> list[SuccessRate]:
    """Roll policy, expert and random actions out on the same seeded episodes of every task.

    `tasks` are MetaWorld names (reach-v3); `spec` is what the policy was built for and gives their
    indices. The policy acts on the device of its parameters; torch's generators are seeded for
    every episode. `on_result` and `on_episode` are called with every result and every episode as
    soon as it is there.

    Raises:
        ConfigError: an unknown task, one that the policy was not trained on, or a policy that
            cannot act on what the simulator shows.
    """
    acting = _check_policy(policy, spec, preprocessor.rename.get(STATE, STATE))
    device = next(iter(policy.parameters())).device
    results: list[SuccessRate] = []
    numbers = _numbers(episodes)
    # All names are checked first: a wrong one must not show after hours of rollouts.
    stages = [(task, Simulator(task, seed), task_index(spec, task)) for task in tasks]
    for task, simulator, index in stages:
        actor = PolicyController(acting, preprocessor, index, device)
        controllers: dict[str, Controller] = {
            "policy": actor,
            "expert": expert(task),
            "random": random_controller(seed),
        }
        for name, controller in controllers.items():
            successes = 0
            for number in numbers:
                if name == "policy":
                    # Each (seed, number) has a stream of its own: below PLACEMENTS no two sums are
                    # equal.
                    torch.manual_seed(seed * PLACEMENTS + number)
                    actor.reset()
                rollout = simulator.rollout(controller, number, max_steps=max_steps)
                successes += rollout.success
                on_episode(Played(task, name, number, rollout))
            result = SuccessRate(task, name, successes, episodes)
            on_result(result)
            results.append(result)
    return results


def task_index(spec: DataSpec, task: str) -> int:
    """Index in the policy's data of MetaWorld's `task`.

    Raises:
        ConfigError: the policy does not know the task.
    """
    # A policy knows a task by its text.
    text = TASKS.get(task, task)
    if text not in spec.tasks:
        known = [name for name, known in TASKS.items() if known in spec.tasks]
        raise ConfigError(
            Problem(
                "tasks",
                f"= {task!r}: the policy was trained on other tasks.",
                f"Use {', '.join(known)}." if known else "Train on the embedded dataset first.",
            )
        )
    return spec.tasks.index(text)


def wilson(successes: int, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion; `z` = 1.96 gives 95%."""
    rate = successes / episodes
    # Wilson 1927. Unlike rate +- spread it holds near 0 and 1, and for few episodes.
    centre = (rate + z * z / (2 * episodes)) / (1 + z * z / episodes)
    spread = z * math.sqrt(rate * (1 - rate) / episodes + (z / (2 * episodes)) ** 2)
    half = spread / (1 + z * z / episodes)
    # Rounding may step over the ends.
    return max(0.0, centre - half), min(1.0, centre + half)


def _numbers(episodes: int) -> range:
    if not 1 <= episodes <= PLACEMENTS:
        raise ConfigError(
            Problem(
                "episodes",
                f"= {episodes}, but one seed holds {PLACEMENTS}.",
                f"Use --episodes 1 to {PLACEMENTS}, and several seeds for more.",
            )
        )
    return range(episodes)


def _check_policy(policy: nn.Module, spec: DataSpec, state: str) -> Actor:
    """The simulator shows a vector of 39 numbers, which the policy reads as `state`."""
    owner = type(policy).__name__
    cameras = getattr(getattr(policy, "config", None), "camera_names", ())
    if not callable(getattr(policy, "select_action", None)):
        message = f"is a {owner}, which does not have a method select_action."
    elif cameras:
        message = f"looks at {', '.join(cameras)}, but the simulation here shows no pictures."
    elif spec.dim(state) != NUM_OBSERVED:
        message = f"reads {state} of {spec.dim(state)} numbers; MetaWorld gives {NUM_OBSERVED}."
    else:
        return cast(Actor, policy)
    raise ConfigError(
        Problem("policy", message, "Evaluate a policy that was trained on the embedded dataset.")
    )
