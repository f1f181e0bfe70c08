"""A picture of a run from its `metrics.jsonl`: loss, learning rate, gradient norm, throughput."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_config import ConfigError, Problem

PICTURE = "report.png"
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

    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle(f"{name}: {rows[-1]['step']} updates, {rows[-1]['samples_seen']:,} samples")
    loss, lr, norm, speed = figure.subplots(2, 2).flat
    _draw(loss, rows, "loss", log=True)
    if any("eval_loss" in row for row in rows):
        _draw(loss, rows, "eval_loss", log=True, marker="o")
        loss.legend()
    _draw(lr, rows, "lr")
    _draw(norm, rows, "grad_norm", log=True)
    _draw(speed, rows, "samples_per_s")
    return figure


def _draw(axes: Any, rows: Rows, key: str, *, log: bool = False, marker: str = "") -> None:
    points = [(row["step"], row[key]) for row in rows if key in row]
    values = [value for _, value in points]
    axes.plot([step for step, _ in points], values, linewidth=1, marker=marker, label=key)
    axes.set_ylabel(key)
    axes.set_xlabel("optimizer updates")
    axes.grid(alpha=0.3)
    # A logarithmic axis cannot show 0.
    if log and min(values, default=0) > 0:
        axes.set_yscale("log")
