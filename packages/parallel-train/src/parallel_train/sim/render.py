"""Renders a rollout with MuJoCo, where the machine can render without a screen.

The episode is played again, in a process of its own: there OpenGL may be chosen anew, print what it
likes, or crash.

    python -m parallel_train.sim.render TASK SEED NUMBER ACTIONS.npy OUT.gif TITLE
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from parallel_train.sim.draw import save_gif
from parallel_train.sim.metaworld import FPS, Simulator, Vector

HEIGHT, WIDTH = 240, 320
TIMEOUT_S = 300.0
# Ten pictures per second of the 80 that are simulated.
_EVERY = 8
_CAMERA = "corner"  # mounted upside down
_CHOICE = "MUJOCO_GL"


class Renderer:
    """Renders with the first of the backends that works here, and remembers when none does."""

    def __init__(self) -> None:
        chosen = os.environ.get(_CHOICE)
        # egl needs a GPU's driver, osmesa renders on the processor. A choice of the user's is not
        # overruled.
        self._backends = [chosen] if chosen else ["egl", "osmesa"]
        self.why_not = ""
        """Why nothing is rendered, once that is known."""

    def render(
        self, task: str, seed: int, number: int, actions: Vector, path: Path, title: str
    ) -> bool:
        """Write the episode as an animated GIF; whether it could be rendered.

        `actions` [frames, 4] are those that were played in episode `number` of `task` and `seed`.
        """
        words = [task, str(seed), str(number)]
        tried = ", ".join(self._backends)
        while self._backends:
            if _render_elsewhere(self._backends[0], words, actions, path, title):
                return True
            # For good: what failed once is not tried again for every picture.
            self._backends.pop(0)
        self.why_not = self.why_not or f"MuJoCo renders nothing here with {_CHOICE}={tried}"
        return False


def _render_elsewhere(
    backend: str, words: list[str], actions: Vector, path: Path, title: str
) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/actions.npy", actions)
        program = [sys.executable, "-W", "ignore", "-m", "parallel_train.sim.render"]
        try:
            done = subprocess.run(
                [*program, *words, f"{folder}/actions.npy", f"{folder}/out.gif", title],
                # MuJoCo reads the variable once, when it is imported.
                env={**os.environ, _CHOICE: backend},
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Path(folder, "out.gif").read_bytes())
        return True


def _pictures(task: str, seed: int, number: int, actions: Vector) -> list[Any]:
    """RGB pictures [height, width, 3] of every eighth frame, and of the last."""
    import mujoco

    simulator = Simulator(task, seed)
    environment = simulator.environment
    renderer = mujoco.Renderer(environment.model, HEIGHT, WIDTH)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        renderer.scene.flags[flag] = False  # without them the processor renders three times as fast
    frame, found = 0, []

    def replay(observation: Vector) -> Vector:
        nonlocal frame
        if frame % _EVERY == 0 or frame == len(actions) - 1:
            renderer.update_scene(environment.data, camera=_CAMERA)
            # The camera is mounted upside down: both axes are turned around.
            found.append(renderer.render()[::-1, ::-1].copy())
        frame += 1
        action: Vector = actions[frame - 1]
        return action

    simulator.rollout(replay, number, max_steps=len(actions))
    renderer.close()
    return found


def _titled(picture: Any, title: str) -> Any:
    from PIL import Image, ImageDraw

    image = Image.fromarray(picture)
    ImageDraw.Draw(image).text((4, 2), title, fill="black")
    return image


def main() -> None:
    """Render what the command line names."""
    task, seed, number, actions, out, title = sys.argv[1:]
    pictures = _pictures(task, int(seed), int(number), np.load(actions))
    images = [_titled(picture, title) for picture in pictures]
    save_gif(images, Path(out), pause_ms=1000 * _EVERY // FPS)


if __name__ == "__main__":
    main()
