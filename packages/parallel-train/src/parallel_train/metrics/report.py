"""A picture of a run from its `metrics.jsonl`: its own numbers and those of its policy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_config import ConfigError, Problem
from parallel_train.metrics.sinks import COSTS

PICTURE = "report.png"
COLUMNS = 3
SMOOTHING = 50
"""A mean reaches over about this part of the run; shorter runs are drawn as they are."""
LOGARITHMIC = ("loss", "grad_norm")
UNITS = {
    "samples_per_s": "samples per second",
    "data_s": "seconds waited for data",
    "peak_memory_gb": "peak memory [GB]",
}
Rows = Sequence[Mapping[str, float]]


def draw_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Draw the run and return the picture's path, `report.png` in the run folder by default.

    Raises:
        ConfigError: the folder does not hold readable metrics.
    """
    folder = Path(run).expanduser()
    rows = read_rows(folder)
    target = Path(output).expanduser() if output is not None else folder / PICTURE
    figure = _figure(folder.resolve().name, rows)
    try:
        figure.savefig(target, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(
            Problem(
                "output", f"= {str(target)!r} cannot be written: {error}.", "Use another --output."
            )
        ) from error
    return target


def read_rows(folder: Path) -> list[dict[str, float]]:
    """The rows of a run, one per optimizer update; a last line that a crash cut short is left out.

    Raises:
        ConfigError: the file is missing or empty.
    """
    path = folder / "metrics.jsonl"
    try:
        # A run that is still writing, or was killed, may end in half a character.
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            Problem(
                "path", f"= {str(folder)!r} does not hold a metrics.jsonl.", "Give a run folder."
            )
        ) from error
    rows = [row for row in map(_row, lines) if row is not None]
    if not rows:
        raise ConfigError(Problem("path", f"= {str(path)!r} does not hold any rows yet."))
    return rows


def _row(line: str) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    # A damaged line may still be JSON: a number, or part of a row.
    if not isinstance(row, dict) or not {"step", "samples_seen"} <= row.keys():
        return None
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _figure(name: str, rows: Rows) -> Any:
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    panels = _panels(rows)
    lines = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3 * lines), layout="constrained")
    figure.suptitle(f"{name}: {rows[-1]['step']} updates, {rows[-1]['samples_seen']:,} samples")
    grid = figure.subplots(lines, COLUMNS, squeeze=False).flat
    for axes, (title, keys) in zip(grid, panels.items(), strict=False):
        _draw(axes, rows, title, keys)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    return figure


def _panels(rows: Rows) -> dict[str, tuple[str, ...]]:
    """Label of each panel and the numbers in it: the run's own first, then the policy's."""
    # A number may come late: an evaluation, or a metric that not every update gives.
    names = list(dict.fromkeys(name for row in rows for name in row))
    own = [n for n in ("loss", "grad_norm", "lr", "samples_per_s", *COSTS, "mfu") if n in names]
    others = [n for n in names if n not in {*own, "step", "samples_seen", "skipped"}]
    first = [n for n in others if not n.startswith("eval_")]
    alone = [n for n in others if n not in first and n.removeprefix("eval_") not in {*own, *first}]
    held_out = {n: (f"eval_{n}",) if f"eval_{n}" in names else () for n in (*own, *first)}
    return {n: (n, *held_out.get(n, ())) for n in (*own, *first, *alone)}


def _draw(axes: Any, rows: Rows, title: str, keys: Sequence[str]) -> None:
    shown: list[float] = []
    for key in keys:
        points = [(row["step"], row[key]) for row in rows if key in row]
        shown += [value for _, value in points]
        steps, values = [step for step, _ in points], [value for _, value in points]
        if key.startswith("eval_") or len(points) < 3 * SMOOTHING:
            marker = "o" if key.startswith("eval_") else ""
            axes.plot(steps, values, linewidth=1.5, marker=marker, markersize=3, label=key)
        else:  # every value faint, and what it comes to over it
            (line,) = axes.plot(steps, values, linewidth=0.7, alpha=0.3, label=key)
            smooth = _smooth(values)
            axes.plot(steps, smooth, linewidth=1.5, color=line.get_color(), label=f"{key} (mean)")
    axes.set_ylabel(UNITS.get(title, title))
    axes.set_xlabel("optimizer updates")
    axes.grid(alpha=0.3)
    if len(keys) > 1:
        axes.legend()
    # A logarithmic axis cannot show 0, and is of no use where the values are close together.
    finite = [value for value in shown if math.isfinite(value)]
    if title in LOGARITHMIC and min(finite, default=0) > 0 and max(finite) > 3 * min(finite):
        axes.set_yscale("log")


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over a `SMOOTHING`-th of the run; what is not finite is passed over."""
    share = min(1.0, SMOOTHING / len(values))
    found: list[float] = []
    mean = next((value for value in values if math.isfinite(value)), math.nan)
    for value in values:
        if math.isfinite(value):
            mean += share * (value - mean)
        found.append(mean)
    return found
