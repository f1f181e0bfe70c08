"""From what a person types to the step folder that is meant, and the newest one that is whole."""

from __future__ import annotations

import os
from pathlib import Path

from parallel_ckpt.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint
from parallel_ckpt.layout import (
    CHECKPOINTS,
    DCP,
    LAST,
    MANIFEST,
    PRETRAINED_MODEL,
    REPLACED,
    TRAIN_CONFIG,
    TRAINING_STATE,
    Hidden,
    RunFolder,
    StepFolder,
    parse_step,
)
from parallel_ckpt.ranks import Ranks, all_ranks
from parallel_ckpt.store.commit import last_name, read_last
from parallel_ckpt.store.integrity import Verify, file_problems, identity_problems, portion
from parallel_ckpt.store.manifest import Manifest, read_manifest, sequence_of
from parallel_config import Problem


def resolve_checkpoint(path: str | Path) -> Path:
    """The step folder meant by `path`, with every link followed. No collective.

    Understood are a step folder, its `pretrained_model` or `training_state`, a file in those, a
    run folder, its `checkpoints`, and `checkpoints/last`; relative or absolute, with or without a
    trailing slash. A run folder means what was committed last in it. A checkpoint that a killed
    save has moved aside for its replacement is found under the name that it had.

    Raises:
        CheckpointNotFound: nothing committed is there; the message names what was looked for.
    """
    given = Path(path).expanduser().absolute()
    if (step := committed_around(given)) is not None:
        return step.path
    for folder in (given, given.parent):
        run = RunFolder(folder)
        if (folder == given or given.name in (CHECKPOINTS, LAST)) and (found := _newest(run)):
            return found.path.resolve()
    if given.name == LAST and (found := _newest(RunFolder(given.parent.parent))):
        return found.path.resolve()
    raise CheckpointNotFound.of(
        path,
        f"is not a checkpoint: neither {given / MANIFEST} nor a committed step in "
        f"{given / CHECKPOINTS} exists.",
        "Give a step folder, its pretrained_model, a run folder, or its checkpoints/last.",
    )


def committed_around(given: Path) -> StepFolder | None:
    """The committed step that an absolute path means or lies in; None when there is none."""
    for candidate in _candidates(given):
        if is_copied_last(candidate):
            newest = _newest(RunFolder(candidate.parent.parent))
            return None if newest is None else StepFolder(newest.path.resolve())
        if StepFolder(candidate).is_committed:
            return StepFolder(candidate.resolve())
        # Followed even where it leads nowhere: `last` names a step that was moved aside.
        home = candidate.resolve()
        if home.name == LAST:  # a file, where links are not to be had
            home = home.with_name(last_name(RunFolder(home.parent.parent)) or LAST)
        step = parse_step(home.name)
        if step is not None and home.parent.name == CHECKPOINTS:
            steps = committed(RunFolder(home.parent.parent))
            if step in steps:
                return StepFolder(steps[step].path.resolve())
    return None


def committed(run: RunFolder) -> dict[int, StepFolder]:
    """Every checkpoint of a run by its step; one that was moved aside lies under a hidden name."""
    found = {
        hidden.step: StepFolder(hidden.path)
        for hidden in moved_aside(run)
        if StepFolder(hidden.path).is_committed
    }
    return found | {step: run.step(step) for step in run.committed_steps()}


def moved_aside(run: RunFolder) -> list[Hidden]:
    """Of each step that is missing, the former checkpoint that was committed last.

    A save that replaces a checkpoint was killed between its two renames.
    """
    found: dict[int, Hidden] = {}
    for hidden in run.hidden_folders():
        if hidden.role != REPLACED or os.path.lexists(run.step(hidden.step).path):
            continue
        other = found.get(hidden.step, hidden)
        found[hidden.step] = max(other, hidden, key=lambda aside: order(StepFolder(aside.path)))
    return list(found.values())


def order(folder: StepFolder) -> int:
    """Greater for what was committed later; least where that cannot be read."""
    sequence = sequence_of(folder)
    return -1 if sequence is None else sequence


def is_copied_last(path: Path) -> bool:
    """Whether this is `last` as a folder of its own, which a copy that follows links makes of it.

    No save updates it, so it soon is not the last one any more.
    """
    inside = path.name == LAST and path.parent.name == CHECKPOINTS
    return inside and path.is_dir() and not path.is_symlink()


def newest_intact(
    run_dir: str | Path, *, verify: Verify = "full"
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Collective: every rank. The newest checkpoint of a run that is whole, None without any.

    The second value lists the newer ones that were skipped, each with the reason. Newest is what
    was committed last.
    """
    ranks = all_ranks("newest_intact")
    run = RunFolder(Path(run_dir).expanduser().absolute())
    skipped: list[tuple[Path, str]] = []
    for path in ranks.from_main(lambda: newest_first(run)):
        try:
            verify_on_all(StepFolder(path), verify, ranks)
        except CheckpointError as error:
            skipped.append((path, str(error)))
        else:
            return path, skipped
    return None, skipped


def verify_on_all(folder: StepFolder, verify: Verify, ranks: Ranks) -> Manifest:
    """Collective: every rank. Check all files, divided among the ranks; the manifest if all hold.

    Raises:
        DamagedCheckpoint: names each file that is missing or differs; the same on every rank.
    """
    manifest, odd = ranks.from_main(lambda: _read_identity(folder))
    mine = portion(manifest, ranks.rank, ranks.world_size)
    found = ranks.together_all(lambda: list(file_problems(folder, mine, verify)))
    problems = odd + [problem for of_rank in found for problem in of_rank]
    if problems:
        raise DamagedCheckpoint(
            sorted(problems, key=lambda problem: problem.path)[:10], source=str(folder.path)
        )
    return manifest


def _read_identity(folder: StepFolder) -> tuple[Manifest, list[Problem]]:
    manifest = read_manifest(folder)
    return manifest, list(identity_problems(folder, manifest))


def _candidates(given: Path) -> list[Path]:
    """Folders that `given` may mean, itself first."""
    candidates = [given]
    parts = {PRETRAINED_MODEL, TRAINING_STATE}
    if given.name in parts:
        candidates.append(given.parent)
    if given.parent.name in parts and (given.is_file() or given.name in (DCP, TRAIN_CONFIG)):
        candidates.append(given.parent.parent)
    return candidates


def _newest(run: RunFolder) -> StepFolder | None:
    """What was committed last. `last` decides only where the manifest that it names is damaged."""
    steps = committed(run)
    pointed = read_last(run)
    if pointed is not None and sequence_of(run.step(pointed)) is None:
        return run.step(pointed)
    found = [steps[step] for step in sorted(steps)]
    if is_copied_last(run.last) and StepFolder(run.last).is_committed:
        found.insert(0, StepFolder(run.last))  # the only one left in some copies
    return max(found, key=order, default=None)


def newest_first(run: RunFolder) -> list[Path]:
    """Committed step folders, the one committed last first; unreadable ones by their number."""
    steps = committed(run)
    found = [(sequence_of(folder), step) for step, folder in steps.items()]
    newer = max((sequence for sequence, _ in found if sequence is not None), default=0) + 1
    keyed = [(newer if sequence is None else sequence, step) for sequence, step in found]
    return [steps[step].path for _, step in sorted(keyed, reverse=True)]
