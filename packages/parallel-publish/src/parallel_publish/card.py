"""The model card: what was trained, on what, how it went, and how to use it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel_config import Problem
from parallel_publish.card_merge import marked
from parallel_publish.config import LICENSES, PublishConfig, is_repo_id
from parallel_publish.sharing import shareable

CARD = "README.md"
CURVE = "loss_curve.svg"
FAINT = 'stroke="#a8c7fa" stroke-width="1"'
BOLD = 'stroke="#1f6feb" stroke-width="2"'


@dataclass(frozen=True, kw_only=True)
class CardInfo:
    """What a card says; everything that is empty or None is left out."""

    title: str = "Trained model"
    summary: str = ""
    """A paragraph under the title."""
    usage: str = ""
    """Python that loads the model; empty: a loader that needs nothing but safetensors."""
    license: str | None = None
    tags: Sequence[str] = ()
    base_model: str | None = None
    datasets: Sequence[str] = ()
    """Names on the Hub go to the metadata; of others (folders) only the last part is shown."""
    pipeline_tag: str | None = None
    library_name: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Rows of the training section: steps, global batch, seed ..."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Final numbers by name."""
    losses: Sequence[tuple[int, float]] = ()
    """(step, loss) of the curve."""
    train_config: str | None = None
    """Text of the run's config, shown folded, without paths and secrets."""

    def with_config(self, config: PublishConfig) -> CardInfo:
        """The same card with what the publish section of the run's config says."""
        from dataclasses import replace

        return replace(
            self,
            license=config.license or self.license,
            tags=tuple(dict.fromkeys((*self.tags, *config.tags))),
            base_model=config.base_model or self.base_model,
        )


def card_problems(info: CardInfo) -> Iterator[Problem]:
    """What the Hub would refuse, found here before anything is trained or sent."""
    if info.license is not None and info.license not in LICENSES:
        yield Problem("card.license", f"= {info.license!r} is not a licence identifier of the Hub.")
    if info.base_model is not None and not is_repo_id(info.base_model):
        yield Problem(
            "card.base_model", f"= {info.base_model!r} is not the name of a model on the Hub."
        )
    for tag in info.tags:
        if not isinstance(tag, str) or not tag.strip():
            yield Problem("card.tags", f"contains {tag!r}, which is not a tag.")


def render_card(info: CardInfo, *, repo_id: str = "") -> str:
    """Text of README.md: metadata for the Hub, then the card itself, between our marks."""
    parts = [
        f"# {info.title}",
        info.summary.strip(),
        "## How to use",
        f"```python\n{(info.usage or _default_usage(repo_id)).strip()}\n```",
        *_training(info),
    ]
    head = _front_matter(info)
    return (f"{head}\n\n" if head else "") + marked("\n\n".join(part for part in parts if part))


def loss_curve_svg(losses: Sequence[tuple[int, float]], *, max_points: int = 400) -> str:
    """A picture of (step, loss): every loss faint, their running mean over it.

    The axis is logarithmic where all losses are above 0: on a linear one the first losses press
    all others to the bottom.
    """
    width, height, left, bottom = 720, 320, 70, 40
    # NaN (which differs from itself) and infinite losses have no place in a picture.
    points = [(step, loss) for step, loss in losses if loss == loss and abs(loss) != float("inf")]
    points = points or [(0, 0.0)]
    smooth = _running_mean(points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    first, last = points[0][0], points[-1][0]
    scale = math.log if low > 0 else float
    bottom_value, span = scale(low), scale(high) - scale(low)

    def place(step: int, loss: float) -> str:
        x = left + (width - left - 20) * (step - first) / max(last - first, 1)
        # A constant loss has no range; 1.0 then avoids a division by zero.
        y = 20 + (height - 20 - bottom) * (1 - (scale(loss) - bottom_value) / (span or 1.0))
        return f"{x:.1f},{y:.1f}"

    def line(of: Sequence[tuple[int, float]], style: str) -> str:
        # Thinned out, since a long run would make the file large; the last loss is always shown.
        shown = [*of[:: max(1, len(of) // max_points)], *of[-1:]]
        path = " ".join(place(*point) for point in shown)
        return f'<polyline points="{path}" fill="none" {style}/>'

    base = height - bottom
    labels = [
        (left - 8, 26, "end", f"{high:.4g}"),
        (left - 8, base, "end", f"{low:.4g}"),
        (left, height - 16, "start", f"step {first}"),
        (width - 20, height - 16, "end", f"step {last}"),
        (width // 2, 16, "middle", "training loss" + (", logarithmic" if low > 0 else "")),
    ]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in labels
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<path d="M{left} 20V{base}H{width - 20}" fill="none" stroke="#888"/>'
        f"{line(points, FAINT)}{line(smooth, BOLD)}"
        f"{texts}</svg>\n"
    )


def _running_mean(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Exponential mean over about a fiftieth of the points."""
    keep = 1 - 1 / max(1, len(points) // 50)
    found, mean = [], points[0][1]
    for step, loss in points:
        mean = keep * mean + (1 - keep) * loss
        found.append((step, mean))
    return found


def _front_matter(info: CardInfo) -> str:
    """YAML without nulls. A JSON string is a YAML string, whatever is in it."""
    fields: dict[str, Any] = {
        "license": info.license,
        "library_name": info.library_name,
        "pipeline_tag": info.pipeline_tag,
        "base_model": info.base_model,
        # The Hub links these names, so a folder does not belong here.
        "datasets": [name for name in info.datasets if is_repo_id(name, namespace=True)],
        "tags": list(dict.fromkeys(info.tags)),
    }
    lines = []
    for name, value in fields.items():
        if isinstance(value, list):
            lines += [f"{name}:", *(f"- {json.dumps(item)}" for item in value)] if value else []
        elif value:
            # Quoted: a tag such as "a: b" would be a mapping in YAML.
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(["---", *lines, "---"]) if lines else ""


def _training(info: CardInfo) -> Iterator[str]:
    facts = {name: value for name, value in info.facts.items() if value not in (None, "")}
    names = [name.rstrip("/").rpartition("/")[2] for name in info.datasets]
    if names:
        on_hub = dict(zip(names, info.datasets, strict=True))
        facts = {
            "dataset": ", ".join(
                on_hub[n] if is_repo_id(on_hub[n], namespace=True) else n for n in names
            )
        } | facts
    if not (facts or info.metrics or info.losses or info.train_config):
        return
    yield "## Training"
    if facts:
        yield _table(("", ""), [(name, str(value)) for name, value in facts.items()])
    if info.metrics:
        rows = [(name, f"{value:.6g}") for name, value in info.metrics.items()]
        yield _table(("metric", "value"), rows)
    if info.losses:
        yield f"![training loss]({CURVE})"
    if info.train_config:
        # The card is public, like the documents beside it.
        text = shareable(info.train_config).strip()
        yield f"<details><summary>train_config.json</summary>\n\n```json\n{text}\n```\n\n</details>"


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    # A bar in a cell would end the cell.
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _default_usage(repo_id: str) -> str:
    return f"""
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors.torch import load_file

folder = Path(snapshot_download({repo_id or "user/name"!r}, allow_patterns="model*.safetensors"))
weights = {{}}
for file in sorted(folder.glob("model*.safetensors")):
    weights |= load_file(file)
"""
