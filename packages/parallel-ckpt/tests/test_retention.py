"""Which checkpoints are deleted, and when."""

from __future__ import annotations

from pathlib import Path

from parallel_ckpt.layout import RunFolder
from parallel_ckpt.store.retention import superseded
from small_runs import saver_of, small


def test_retention() -> None:
    steps = {100: 1, 200: 2, 250: 3, 300: 4, 400: 5}
    assert superseded(steps, keep_last=None, keep_every=None) == []
    assert superseded(steps, keep_last=1, keep_every=None) == [100, 200, 250, 300]
    assert superseded(steps, keep_last=1, keep_every=200) == [100, 250, 300]
    assert superseded(steps, keep_last=2, keep_every=None, protected=[100]) == [200, 250]
    taken_up_at_100 = {100: 1, 400: 2, 500: 3, 150: 4, 200: 5}
    assert superseded(taken_up_at_100, keep_last=2, keep_every=None) == [100, 400, 500]


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
