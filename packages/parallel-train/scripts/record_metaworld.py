"""Record the embedded dataset from MetaWorld's scripted experts.

    python packages/parallel-train/scripts/record_metaworld.py OUTPUT_FOLDER

Needs the `sim` extra. Same versions, same seeds, same bytes.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import gymnasium
import metaworld  # noqa: F401  (registers its environments)
import numpy as np
from metaworld.policies import ENV_POLICY_MAP

from parallel_train.data.writing import Episode, write_dataset

TASKS = {
    "reach-v3": "move the gripper to the goal",
    "push-v3": "push the puck to the goal",
    "drawer-close-v3": "close the drawer",
}
EPISODES_PER_TASK = 20
FRAMES_AFTER_SUCCESS = 10
FPS = 80  # MetaWorld simulates 5 x 2.5 ms per action


def record(name: str, seed: int) -> Episode:
    """One successful demonstration."""
    env = gymnasium.make("Meta-World/MT1", env_name=name, seed=seed)
    expert = ENV_POLICY_MAP[name]()
    observation, _ = env.reset(seed=seed)
    states, actions, left = [], [], None
    for _ in range(env.spec.max_episode_steps):
        action = np.clip(expert.get_action(observation), -1, 1).astype(np.float32)
        states.append(observation.astype(np.float32))
        actions.append(action)
        observation, _, _, truncated, info = env.step(action)
        if left is None and info["success"]:
            left = FRAMES_AFTER_SUCCESS
        elif left is not None:
            left -= 1
        if left == 0 or truncated:
            break
    env.close()
    if left is None:
        raise RuntimeError(f"{name}, seed {seed}: the expert failed")
    return Episode(np.stack(states), np.stack(actions), TASKS[name])


def main() -> None:
    """Record every task and say how large the result is."""
    warnings.filterwarnings("ignore")
    root = Path(sys.argv[1])
    episodes = [
        record(name, seed=1000 * task + episode)
        for task, name in enumerate(TASKS)
        for episode in range(EPISODES_PER_TASK)
    ]
    write_dataset(root, episodes, fps=FPS, robot_type="sawyer (MetaWorld)")
    num_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    frames = sum(len(episode.action) for episode in episodes)
    print(f"{len(episodes)} episodes, {frames} frames, {num_bytes} bytes")


if __name__ == "__main__":
    main()
