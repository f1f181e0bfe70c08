"""A call that one rank makes alone, and an error of one rank, are told on every rank."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    Manifest,
    load_weights,
    newest_intact,
    restore,
    save_weights,
)
from parallel_ckpt import ranks as _ranks
from parallel_ckpt.formats.box import Box
from parallel_ckpt.save import rank_files as writing
from parallel_config import Topology, is_agreed
from parallel_testing.ranks import rank_outcomes, run_ranks
from small_runs import build, quiet, train_on

TWO = Topology(dp_shard=2)


def call_on_main_alone(call: str, root: Path) -> str:
    model, optimizer = build()
    saver = CheckpointSaver(root / "run", topology=TWO, on_note=quiet)
    saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    _ranks.ENTRY_S = 1.0
    calls = {
        "save": lambda: saver.save(step=2, samples_seen=0, model=model, optimizer=optimizer),
        "save_weights": lambda: save_weights(model, root / "exported"),
        "restore": lambda: restore(root / "run", model, optimizer),
        "load_weights": lambda: load_weights(model, root / "run"),
    }
    begin = time.monotonic()
    message = ""
    if dist.get_rank() == 0:
        try:
            calls[call]()
        except CheckpointError as error:
            message = str(error)
        assert time.monotonic() - begin < 15
        (root / "told").touch()
    while not (root / "told").exists():  # rank 1 is busy with something else
        time.sleep(0.05)
    return message


@pytest.mark.parametrize("call", ["save", "save_weights", "restore", "load_weights"])
def test_a_collective_call_that_one_rank_makes_alone_is_told(call: str, tmp_path: Path) -> None:
    outcomes = rank_outcomes(call_on_main_alone, 2, call, tmp_path, timeout_s=60)
    assert outcomes[0].exit_code is not None, outcomes[0].error
    message = str(outcomes[0].result)
    who = "ranks [1]" if call == "save" else "another rank"
    words = f"was not made by {who} within 1 s. Every rank must make this call"
    assert words in message, outcomes[0].error


def hear_of_plans(root: Path) -> tuple[list[str], list[int], list[str]]:
    """Kinds of plans that this rank was sent, results that it got, and what it was told."""
    heard: list[str] = []

    def hear(self: Any, state: Any) -> None:
        heard.append(type(self).__name__)
        names = [field.name for field in fields(self)]
        for name, value in (
            state.items() if isinstance(state, dict) else zip(names, state, strict=True)
        ):
            object.__setattr__(self, name, value)

    for kind in (writing.RankFiles, Box, Manifest):
        kind.__setstate__ = hear
    model, optimizer = build()
    train_on(model, optimizer, 0)
    topology = Topology(dp_shard=3)
    with CheckpointSaver(root, topology=topology, on_note=quiet) as saver:
        saver.save(step=1, samples_seen=0, model=model, optimizer=optimizer)
    newest_intact(root)
    ranks = _ranks.all_ranks()
    got = ranks.together_for_main(lambda: 10 * ranks.rank)
    told = []
    for call in (ranks.together_for_main, ranks.from_main):
        try:
            call(lambda: [][0] if ranks.rank != 1 else 0)
        except CheckpointError as error:
            told.append(str(error))
    return heard, got, told


def test_an_error_of_one_process_alone_is_agreed_with_nobody() -> None:
    """Its engine would not tell the peers, who wait for it."""
    alone = _ranks.Ranks()
    for call in (alone.together, alone.together_all, alone.together_for_main, alone.from_main):
        with pytest.raises(CheckpointError, match="IndexError") as failed:
            call(lambda: [][0])
        assert not is_agreed(failed.value)


def test_a_rank_is_sent_what_it_uses_and_every_rank_hears_of_an_error(tmp_path: Path) -> None:
    outcomes = run_ranks(hear_of_plans, 3, tmp_path)
    (heard, got, told), *others = outcomes
    assert heard.count("RankFiles") == 3
    assert heard.count("Box") == 3 * 4
    assert got == [0, 10, 20]
    assert told == 2 * ["rank 0 failed: IndexError: list index out of range"]
    for heard, got, also_told in others:
        assert heard == ["Manifest"]
        assert got == []
        assert also_told == told
