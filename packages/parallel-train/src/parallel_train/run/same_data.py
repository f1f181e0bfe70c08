"""Keeps for a resumed run what its weights were trained with, whatever data lie there now.

The weights mean something only behind the normalization that they were trained with, and with
every task and every entry of a vector at its old place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel_config import ConfigError, Problem
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.spec import ACTION, DataSpec, Feature
from parallel_train.policies.base import PolicyConfig
from parallel_train.policies.processors import CONFIG_FILE, Normalizer, Preprocessor

_NEW_RUN = "or start a new run on these data, with another --output_dir"


@dataclass(frozen=True, kw_only=True)
class TrainedBefore:
    """The data of the run that is resumed, as its checkpoint describes them."""

    folder: Path
    """Of the model, with `config.json` and the preprocessor's files."""
    data_state: object = None
    """As it was given to the saver."""
    new_statistics: bool = False
    """Whether statistics were asked for by flag, and so are taken from the dataset of now."""

    def preprocessor(self, fresh: Preprocessor) -> tuple[Preprocessor, list[str]]:
        """The preprocessor to go on with, where today's data would give `fresh`; lines about it.

        The checkpoint's values are kept; a feature that has another mode now, or had none, gets
        those of `fresh`.
        """
        # A checkpoint of another program has no preprocessor.
        if not (self.folder / CONFIG_FILE).is_file():
            return fresh, []
        saved = Preprocessor.from_pretrained(self.folder).normalizers
        lines: list[str] = []
        kept: dict[str, Normalizer] = {}
        for name, new in fresh.normalizers.items():
            old = saved.get(name)
            # Values of one mode mean nothing to another.
            if old is None or old.mode != new.mode:
                before = "none" if old is None else old.mode
                lines.append(f"normalization of {name}: {before} -> {new.mode}, of these data")
                kept[name] = new
                continue
            difference = _difference(old, new)
            if difference and self.new_statistics:
                lines.append(f"normalization of {name}: {difference} (--dataset.stats was given)")
            elif difference:
                lines.append(
                    f"normalization of {name}: the checkpoint's is kept; these data would give "
                    f"{difference} (--dataset.stats file or data takes them)"
                )
            kept[name] = new if self.new_statistics else old
        gone = [name for name in saved if name not in fresh.normalizers]
        lines += [f"normalization of {name}: {saved[name].mode} -> none" for name in gone]
        # The names of now: they say how to read today's dataset.
        return Preprocessor(kept, fresh.rename), lines

    def check(self, dataset: LeRobotDataset, policy: PolicyConfig) -> list[str]:
        """Lines about what is new in the data; only what `policy` reads can be a problem.

        Raises:
            ConfigError: what the weights learned would mean something else with these data.
        """
        saved = self._spec()
        problems: list[Problem] = []
        lines: list[str] = []
        if saved is not None:
            problems += feature_problems(saved, dataset.spec, getattr(policy, "reads", _is_read))
            # A policy that does not say is taken to have learned the numbers, if there are tasks at
            # all.
            numbered = getattr(policy, "knows_task_numbers", bool)
            if numbered(len(saved.tasks)) or numbered(len(dataset.tasks)):
                problems += _task_problems(saved.tasks, dataset.tasks)
            if saved.tasks != dataset.tasks:
                lines.append(f"tasks of the dataset: {len(saved.tasks)} -> {len(dataset.tasks)}")
        if problems:
            raise ConfigError(problems)
        counts = self.data_state if isinstance(self.data_state, dict) else {}
        now = sizes(dataset)
        # Told and not refused: data may grow or be mended between two starts.
        changed = [name for name, value in now.items() if counts.get(name, value) != value]
        if changed == ["fingerprint"]:
            lines.append(
                f"the training data in {dataset.metadata.root} are as many as the checkpoint's, "
                f"but others: fingerprint {counts['fingerprint']} -> {now['fingerprint']}"
            )
        lines += [
            f"{name} of the training data: {counts[name]} -> {now[name]}"
            for name in changed
            if name != "fingerprint"
        ]
        return lines

    def _spec(self) -> DataSpec | None:
        try:
            document = json.loads((self.folder / "config.json").read_text(encoding="utf-8-sig"))
            return DataSpec.from_plain(document["data"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # written by another program: there is nothing to compare


def sizes(dataset: LeRobotDataset) -> dict[str, int | str]:
    """What a checkpoint remembers of what was trained on."""
    return {
        "samples": len(dataset),
        "episodes": dataset.num_episodes,
        "fingerprint": dataset.fingerprint,
    }


def _difference(old: Normalizer, new: Normalizer) -> str:
    """The entry that changed most, or "" where the two are alike but for rounding."""
    if old.shift.shape != new.shift.shape:
        return f"the shape {list(old.shift.shape)} -> {list(new.shift.shape)}"
    # Relative to the larger of the two: a shift near 0 has no scale of its own.
    size = torch.maximum(old.scale.abs(), old.shift.abs())
    for part in ("scale", "shift"):
        was, now = getattr(old, part).flatten(), getattr(new, part).flatten()
        far = (was - now).abs() / size.flatten()
        at = int(far.argmax()) if far.numel() else 0
        # Above what float32 rounds when statistics are computed again.
        if far.numel() and far[at] > 1e-5:
            return f"{part}[{at}] {was[at]:.4g} -> {now[at]:.4g}"
    return ""


def _is_read(name: str) -> bool:
    return name == ACTION or name.startswith("observation.")


def feature_problems(
    saved: DataSpec, now: DataSpec, is_read: Callable[[str], bool] = _is_read
) -> Iterator[Problem]:
    if saved.fps != now.fps:
        yield _problem(
            f"has {now.fps:g} fps, but the checkpoint was trained at {saved.fps:g}: the same "
            "number of actions would last another time.",
            f"Record or resample at {saved.fps:g} fps",
        )
    for name, old in saved.features.items():
        if not (old.is_vector and is_read(name)):
            continue
        new = now.features.get(name)
        if new is None:
            yield _problem(
                f"does not have {name!r}, which the checkpoint was trained with.",
                f"Name the feature that it is: --dataset.rename NAME={name}",
            )
        elif old.shape != new.shape:
            yield _problem(
                f"has {name!r} of shape {list(new.shape)}, but the checkpoint was trained with "
                f"{list(old.shape)}.",
                f"Bring it to the shape {list(old.shape)}",
            )
        elif _reordered(old, new):
            yield _problem(
                f"has the entries of {name!r} in the order {list(new.names or ())}, but the "
                f"checkpoint was trained with {list(old.names or ())}.",
                "Bring them into that order",
            )


def _reordered(old: Feature, new: Feature) -> bool:
    """Whether the same entries stand elsewhere; other labels alone do not change the data."""
    before, after = old.names or (), new.names or ()
    # Only the same labels in another order prove that entries have moved.
    return before != after and sorted(map(str, before)) == sorted(map(str, after))


def _task_problems(saved: tuple[str, ...], now: tuple[str, ...]) -> Iterator[Problem]:
    """A task's number is what was learned; tasks may be added at the end."""
    if now[: len(saved)] == saved:
        return
    at = next((i for i, pair in enumerate(zip(saved, now, strict=False)) if len(set(pair)) > 1), -1)
    found = (
        f"has {len(now)} of the {len(saved)} tasks" if at < 0 else f"has {now[at]!r} as task {at}"
    )
    wanted = saved[at] if at >= 0 else saved[len(now)]
    number = at if at >= 0 else len(now)
    yield _problem(
        f"{found}, but the checkpoint was trained with {wanted!r} as task {number}.",
        "Give every task the number that it had (meta/tasks.parquet and task_index)",
    )


def _problem(message: str, way: str) -> Problem:
    return Problem("dataset.root", f": the dataset {message}", f"{way}, {_NEW_RUN}.")
