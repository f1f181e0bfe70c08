"""MetaWorld tasks for recording and evaluation; needs the `sim` extra.

An episode is decided by (task, seed, number): MetaWorld draws 50 placements of objects and goal
from the seed, and the number chooses one of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_config import ConfigError, Problem

TASKS = {
    "reach-v3": "move the gripper to the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick the puck up and bring it to the goal",
    "drawer-close-v3": "close the drawer",
}
"""MetaWorld's name of each task of the embedded dataset, and its text there."""
FPS = 80
"""Actions per second: the simulator runs five steps of 2.5 ms for each."""
NUM_OBSERVED = 39
"""Numbers of an observation."""
PLACEMENTS = 50
"""Episodes that one seed holds."""

Vector = npt.NDArray[np.float32]
Controller = Callable[[Vector], Vector]
"""From the observation [39] to the action [4], both float32."""


@dataclass(frozen=True)
class Rollout:
    """One episode, from its first frame to the last action."""

    observations: Vector
    """Shape [frames, 39]: what each action answered to."""
    actions: Vector
    """Shape [frames, 4]."""
    success_frame: int | None
    """Frame after whose action the task was first solved."""

    @property
    def success(self) -> bool:
        """Whether the task was solved at any frame."""
        return self.success_frame is not None


class Simulator:
    """One MetaWorld task with the placements of one seed.

    Raises:
        ConfigError: MetaWorld is not installed, or it has no such task.
    """

    def __init__(self, task: str, seed: int) -> None:
        metaworld = _import_metaworld()
        if task not in metaworld.ALL_V3_ENVIRONMENTS:
            raise ConfigError(
                Problem(
                    "tasks",
                    f"= {task!r} is not a MetaWorld task.",
                    f"Known: {', '.join(TASKS)} ...",
                )
            )
        benchmark = metaworld.MT1(task, seed=seed)
        self.task = task
        # MT1 draws them from the seed: the same episodes on every machine.
        self._placements = benchmark.train_tasks
        self.environment: Any = benchmark.train_classes[task]()
        """Gymnasium's."""

    def rollout(
        self,
        controller: Controller,
        number: int,
        *,
        max_steps: int = 500,
        frames_after_success: int = 0,
    ) -> Rollout:
        """Play episode `number` (below `PLACEMENTS`) until it is solved or `max_steps` are done."""
        self.environment.set_task(self._placements[number])
        observation, _ = self.environment.reset()
        observations: list[Vector] = []
        actions: list[Vector] = []
        solved: int | None = None
        for frame in range(max_steps):
            # Before the step: frame k is what action k answers to.
            observations.append(observation.astype(np.float32))
            # The simulator clips as well; the recorded action must be the one that was carried out.
            actions.append(np.clip(controller(observations[-1]), -1, 1).astype(np.float32))
            observation, _, _, _, info = self.environment.step(actions[-1])
            # The first time counts, also where the object slips away later.
            if solved is None and info["success"] > 0:
                solved = frame
            if solved is not None and frame >= solved + frames_after_success:
                break
        return Rollout(np.stack(observations), np.stack(actions), solved)


def expert(task: str) -> Controller:
    """MetaWorld's scripted controller of `task`."""
    _import_metaworld()
    from metaworld.policies import ENV_POLICY_MAP

    policy: Any = ENV_POLICY_MAP[task]
    policy = policy()

    def act(observation: Vector) -> Vector:
        with warnings.catch_warnings():
            # Its gains ask for more than the actuators give; the action is clipped.
            warnings.filterwarnings("ignore", message="Constant", category=UserWarning)
            action: Vector = policy.get_action(observation.astype(np.float64))
        return action

    return act


def random_controller(seed: int) -> Controller:
    """Uniform actions."""
    generator = np.random.default_rng(seed)
    return lambda observation: generator.uniform(-1, 1, 4).astype(np.float32)


def _import_metaworld() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import metaworld
    except ImportError as error:
        raise ConfigError(
            Problem(
                "evaluate",
                f": MetaWorld cannot be imported ({error}).",
                'Install the extra: pip install "parallel-train[sim]".',
            )
        ) from error
    return metaworld
