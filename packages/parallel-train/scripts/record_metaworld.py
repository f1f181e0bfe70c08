"""Record the embedded dataset from MetaWorld's scripted experts.

    python packages/parallel-train/scripts/record_metaworld.py OUTPUT_FOLDER

The script needs the `sim` extra. The same versions of its packages write the same bytes.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from parallel_train.data.writing import Episode, write_dataset
from parallel_train.sim.metaworld import FPS, TASKS, Simulator, expert

SEED = 1000
EPISODES_PER_TASK = 20
FRAMES_AFTER_SUCCESS = 10  # so that the policy also sees what to do at the goal


def record_task(task: str) -> list[Episode]:
    """Demonstrations of one task.

    Raises:
        RuntimeError: the expert failed. Every demonstration must be a solved episode.
    """
    simulator, controller = Simulator(task, SEED), expert(task)
    episodes = []
    for number in range(EPISODES_PER_TASK):
        rollout = simulator.rollout(controller, number, frames_after_success=FRAMES_AFTER_SUCCESS)
        if not rollout.success:
            raise RuntimeError(f"{task}: the expert failed in episode {number} of seed {SEED}")
        episodes.append(Episode(rollout.observations, rollout.actions, TASKS[task]))
    return episodes


def main() -> None:
    """Record every task and print the size of the result."""
    root = Path(sys.argv[1])
    episodes = [episode for task in TASKS for episode in record_task(task)]
    write_dataset(root, episodes, fps=FPS, robot_type="sawyer (MetaWorld)")
    num_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    frames = sum(len(episode.action) for episode in episodes)
    versions = " ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("metaworld", "mujoco", "gymnasium", "numpy", "pyarrow")
    )
    print(f"{len(episodes)} solved episodes, {frames} frames, {num_bytes} bytes; {versions}")


if __name__ == "__main__":
    main()
