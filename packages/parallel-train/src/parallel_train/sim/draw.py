"""Draws a rollout as a small moving picture: the table from above and from the side.

It is drawn from the observations, so that it needs no graphics driver. Observations of MetaWorld
hold the hand at 0:3, the first object at 4:7 and the goal at 36:39, in metres: x to the right, y
away from the robot, z up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallel_train.sim.metaworld import FPS, Rollout, Vector

SIZE = 220
"""Pixels of one view, both ways."""
# Twenty pictures per second of the 80 that are simulated.
_EVERY = 4
_LAST_MS = 1500
_GREY, _HAND, _OBJECT, _GOAL = (200, 200, 200), (30, 90, 200), (230, 130, 20), (20, 150, 60)
# Axis to the right, axis upwards, and the stretch of each in metres.
_VIEWS = {
    "from above": ((0, -0.5, 0.5), (1, 0.2, 1.2)),
    "from the side": ((1, 0.2, 1.2), (2, -0.1, 0.9)),
}


def draw_rollout(rollout: Rollout, path: Path, title: str) -> None:
    """Write an animated GIF, about as long as the episode took.

    Blue is the hand with its trail, orange the object, green the goal.
    """
    from PIL import Image

    last = len(rollout.observations) - 1
    frames = [*range(0, last, _EVERY), last]
    images = [_picture(rollout.observations[: frame + 1], title, Image) for frame in frames]
    save_gif(images, path, pause_ms=1000 * _EVERY // FPS)


def save_gif(images: Sequence[Any], path: Path, *, pause_ms: int) -> None:
    """Write the images as one moving picture that stands still for a while at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[pause_ms] * (len(images) - 1) + [_LAST_MS],
        loop=0,
    )


def _picture(observations: Vector, title: str, image: Any) -> Any:
    from PIL import ImageDraw

    canvas = image.new("RGB", (SIZE * len(_VIEWS), SIZE + 16), "white")
    draw = ImageDraw.Draw(canvas)
    draw.text((4, 2), title, fill="black")
    for column, (name, axes) in enumerate(_VIEWS.items()):
        corner = (SIZE * column, 16)
        draw.rectangle((*corner, corner[0] + SIZE - 1, corner[1] + SIZE - 1), outline=_GREY)
        draw.text((corner[0] + 4, corner[1] + SIZE - 14), name, fill=_GREY)
        now = observations[-1]
        # The goal first, or it would cover the hand that reaches it.
        _cross(draw, _pixels(now[None, 36:39], axes, corner)[0])
        _dot(draw, _pixels(now[None, 4:7], axes, corner)[0], _OBJECT)
        trail = _pixels(observations[:, :3], axes, corner)
        if len(trail) > 1:
            draw.line(trail, fill=_HAND)
        _dot(draw, trail[-1], _HAND)
    return canvas


def _pixels(points: Vector, axes: Any, corner: tuple[int, int]) -> list[tuple[float, float]]:
    """Places [N, 3] in metres as pixels of one view."""
    (right, left_m, right_m), (up, bottom_m, top_m) = axes
    # What leaves the stretch stays visible at its edge.
    x = np.clip((points[:, right] - left_m) / (right_m - left_m), 0, 1)
    y = np.clip((points[:, up] - bottom_m) / (top_m - bottom_m), 0, 1)
    # Pixels count downwards, metres upwards.
    pixels = np.stack([corner[0] + x * (SIZE - 1), corner[1] + (1 - y) * (SIZE - 1)], axis=1)
    return [(float(a), float(b)) for a, b in pixels]


def _dot(draw: Any, at: tuple[float, float], colour: tuple[int, int, int]) -> None:
    x, y = at
    draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=colour)


def _cross(draw: Any, at: tuple[float, float]) -> None:
    x, y = at
    draw.line((x - 6, y - 6, x + 6, y + 6), fill=_GOAL, width=2)
    draw.line((x - 6, y + 6, x + 6, y - 6), fill=_GOAL, width=2)
