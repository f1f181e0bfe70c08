"""Write your own demonstrations as a LeRobotDataset v3.0 folder, which `ptrain train` reads.

    python examples/03_own_dataset.py demonstrations
    ptrain train --dataset.root demonstrations --steps 200

Here a point on a table is pushed to a goal. A recorder for a robot looks the same: it makes one
array of states and one array of actions per episode.
"""

import sys
from pathlib import Path

import numpy as np

from parallel_train.data.writing import Episode, write_dataset

FPS = 10


def demonstration(rng: np.random.Generator) -> Episode:
    """States [frames, 4] hold position and goal. Actions [frames, 2] hold the next move."""
    position, goal = rng.uniform(-1, 1, (2, 2))
    states, actions = [], []
    for _ in range(40):
        move = np.clip(goal - position, -0.1, 0.1)
        states.append(np.concatenate([position, goal]))
        actions.append(move)
        position = position + move
    return Episode(np.array(states, np.float32), np.array(actions, np.float32), "push the point")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rng = np.random.default_rng(0)
    write_dataset(Path(sys.argv[1]), [demonstration(rng) for _ in range(20)], fps=FPS)
