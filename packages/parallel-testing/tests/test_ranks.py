"""Ranks return results; what goes wrong on one of them is shown and does not hold up the test."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from parallel_testing.ranks import RanksFailed, rank_outcomes, run_ranks


def _sum_of_ranks(offset):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item() + offset


def _raise_on_one():
    if dist.get_rank() == 1:
        raise ValueError("only here")
    return "fine"


def _hang_on_one():
    if dist.get_rank() == 1:
        time.sleep(60)


def _die_on_one():
    if dist.get_rank() == 1:
        os._exit(7)


def _variables():
    return os.environ["RANK"], os.environ["EXTRA"], torch.cuda.is_available()


def _has_imported_wave():
    return "wave" in sys.modules


def test_a_preloaded_module_is_there_before_a_rank_imports_it():
    assert "wave" not in sys.modules  # only the forkserver has imported it
    assert run_ranks(_has_imported_wave, 1, init=False) == [True]


def test_results_come_back_by_rank():
    assert run_ranks(_sum_of_ranks, 3, 0.5) == [3.5, 3.5, 3.5]


def test_an_exception_is_shown_with_its_rank():
    with pytest.raises(RanksFailed, match=r"rank 1 ended with 1\n(.|\n)*only here"):
        run_ranks(_raise_on_one, 2)


def test_a_hang_is_cut_short_and_shows_where():
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 hung in\n(.|\n)*_hang_on_one"):
        run_ranks(_hang_on_one, 2, timeout_s=8)
    assert time.monotonic() - started < 30


def test_a_rank_that_dies_is_shown_with_its_exit_code():
    outcomes = rank_outcomes(_die_on_one, 2)
    assert outcomes[1].exit_code == 7
    assert not outcomes[1].ok


def test_variables_reach_the_ranks():
    results = run_ranks(_variables, 2, env={"EXTRA": "x"}, init=False)
    assert results == [("0", "x", False), ("1", "x", False)]
