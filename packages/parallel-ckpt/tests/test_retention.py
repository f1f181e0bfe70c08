"""Which checkpoints are deleted, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_ckpt import CheckpointError, read_manifest
from parallel_ckpt.layout import RunFolder
from parallel_ckpt.store.retention import Commit, line_of_descent, superseded
from small_runs import saver_of, small


def test_retention() -> None:
    steps = {100: Commit(1, None), 200: Commit(2, 1), 250: Commit(3, 2), 300: Commit(4, 3)}
    steps[400] = Commit(5, 4)
    assert superseded(steps, newest=400, keep_last=None, keep_every=None) == []
    assert superseded(steps, newest=400, keep_last=1, keep_every=None) == [100, 200, 250, 300]
    assert superseded(steps, newest=400, keep_last=1, keep_every=200) == [100, 250, 300]
    kept = superseded(steps, newest=400, keep_last=2, keep_every=None, protected=[100])
    assert kept == [200, 250]


@pytest.mark.parametrize(
    ("commits", "newest", "line"),
    [
        # Taken up again from 100: what came after it is abandoned, whatever its steps.
        (
            {100: (1, None), 400: (2, 1), 500: (3, 2), 150: (4, 1), 200: (5, 4)},
            200,
            [200, 150, 100],
        ),
        ({4: (2, 1), 10: (3, 2), 6: (4, 2)}, 6, [6, 4]),
        # An abandoned step below the new one is not an ancestor either.
        ({4: (1, None), 5: (2, 1), 6: (3, 1)}, 6, [6, 4]),
        # A deleted parent: the line goes on with the newest earlier commit of a lower step.
        ({2: (1, None), 6: (3, 2)}, 6, [6, 2]),
        # format_version 1 does not say it.
        ({2: (1, None), 9: (2, None), 4: (3, None)}, 4, [4, 2]),
        # Saved again after going back to before it: what came after the former one is abandoned.
        ({2: (1, None), 6: (3, 2), 4: (4, 1)}, 4, [4, 2]),
        ({7: (1, None)}, 7, [7]),
    ],
)
def test_the_line_of_descent(
    commits: dict[int, tuple[int, int | None]], newest: int, line: list[int]
) -> None:
    assert line_of_descent({step: Commit(*c) for step, c in commits.items()}, newest) == line


def test_retention_keeps_what_the_run_goes_on_from(tmp_path: Path) -> None:
    """`resume RUN/checkpoints/000004 --checkpoint.keep_last 2`: 8 and 10 are abandoned."""
    model, _ = small()
    with saver_of(tmp_path) as saver:
        for step in (2, 4, 8, 10):
            saver.save(step=step, samples_seen=0, model=model)
    notes: list[str] = []
    resumed = tmp_path / "checkpoints/000004"
    with saver_of(tmp_path, keep_last=2, resumed_from=resumed, on_note=notes.append) as saver:
        saver.save(step=6, samples_seen=0, model=model)
    assert RunFolder(tmp_path).committed_steps() == [4, 6]
    assert any("deleting 000008, 000010: the run does not go on from there" in n for n in notes)
    with saver_of(tmp_path, keep_last=2, on_note=notes.append) as saver:  # another process goes on
        saver.save(step=7, samples_seen=0, model=model)
    assert RunFolder(tmp_path).committed_steps() == [6, 7]


@pytest.mark.parametrize("wrong", ["nowhere", "run/checkpoints/000099", "other/checkpoints/000002"])
def test_going_on_from_a_checkpoint_of_no_run_or_another_is_refused(
    tmp_path: Path, wrong: str
) -> None:
    """Retention would delete the checkpoint that training really went on from."""
    model, _ = small()
    for name in ("run", "other"):
        with saver_of(tmp_path / name) as saver:
            saver.save(step=2, samples_seen=0, model=model)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        saver_of(tmp_path / "run", resumed_from=tmp_path / wrong)


@pytest.mark.parametrize("way", ["", "checkpoints/000002/pretrained_model", "checkpoints/last"])
def test_every_way_to_name_a_checkpoint_names_the_one_that_a_run_goes_on_from(
    tmp_path: Path, way: str
) -> None:
    model, _ = small()
    with saver_of(tmp_path) as saver:
        saver.save(step=2, samples_seen=0, model=model)
    with saver_of(tmp_path, resumed_from=tmp_path / way) as saver:
        saver.save(step=3, samples_seen=0, model=model)
    assert read_manifest(RunFolder(tmp_path).step(3)).parent == 1


def test_a_run_taken_up_from_an_earlier_step_keeps_what_it_saves(tmp_path: Path) -> None:
    model, _ = small()
    with saver_of(tmp_path) as saver:
        for step in (100, 200, 300, 400, 500):
            saver.save(step=step, samples_seen=0, model=model)
    (tmp_path / "checkpoints/000400/manifest.json").write_text("{")
    for step, kept in ((150, [150, 400, 500]), (200, [150, 200, 400]), (250, [200, 250, 400])):
        with saver_of(tmp_path, keep_last=2) as saver:
            saver.save(step=step, samples_seen=0, model=model)
        assert RunFolder(tmp_path).committed_steps() == kept


def test_old_checkpoints_go_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    model, optimizer = small()
    with saver_of(tmp_path, keep_last=2) as saver:
        for step in (1, 2, 3):
            saver.save(step=step, samples_seen=0, model=model, optimizer=optimizer)
    names = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert names == ["000002", "000003", "last"]
