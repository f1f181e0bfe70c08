"""`accumulate` ends with the loader, on all ranks at the same window."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from parallel_config import AcceleratorConfig, ConfigError, GradientAccumulationConfig
from parallel_engine import Engine
from parallel_testing.ranks import rank_outcomes, run_ranks


class Batches:
    """So many batches in each pass, numbered; the length is told, or is not, or is wrong."""

    def __init__(self, count):
        self.count, self.passes = count, []

    def set_epoch(self, number):
        self.passes.append(number)

    def __iter__(self):
        return iter([torch.full((2, 4), float(i)) for i in range(self.count)])


class Sized(Batches):
    def __len__(self):
        return self.count


class Boasting(Batches):
    def __len__(self):
        return self.count + 2


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(3, 4)


def mean(model, batch):
    return model(batch).square().mean()


def prepared(steps=1):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(steps=steps))
    engine = Engine(accelerator=config, device="cpu")
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    return engine, model, optimizer


def first_numbers(windows):
    """Number of the first batch of each window."""
    return [int(window[0][0, 0]) for window in windows]


def test_a_loop_over_epochs_ends_and_numbers_its_passes():
    engine, _, _ = prepared()
    batches = Sized(2)
    seen = [first_numbers(engine.accumulate(batches)) for _ in range(3)]
    assert (seen, batches.passes) == ([[0, 1]] * 3, [0, 1, 2])
    assert first_numbers(engine.accumulate(batches, epochs=2)) == [0, 1, 0, 1]
    assert batches.passes == [0, 1, 2, 3, 4]
    list(engine.accumulate(batches, first_epoch=7))
    next(iter(engine.accumulate(batches)))  # a pass that was broken off counts as begun
    list(engine.accumulate(batches))
    assert batches.passes == [0, 1, 2, 3, 4, 7, 8, 9]
    other = Sized(1)
    list(engine.accumulate(other))
    assert other.passes == [0]


def test_windows_run_over_the_ends_of_passes_and_the_rest_is_left_out_and_said_once(caplog):
    engine, _, _ = prepared(steps=2)
    with caplog.at_level(logging.INFO, "parallel_engine"):
        assert first_numbers(engine.accumulate(Sized(5), epochs=3)) == [0, 2, 4, 1, 3, 0, 2]
        assert first_numbers(engine.accumulate(Sized(3))) == [0]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "accumulate leaves out the last micro-batches (1 on rank 0): an update takes 2 of every "
        "rank. This is said once"
    ]


def test_a_run_once_loader_is_one_epoch():
    engine, _, _ = prepared()
    assert first_numbers(engine.accumulate(iter(Batches(3)))) == [0, 1, 2]
    with pytest.raises(ConfigError, match="as a generator does, which runs once"):
        list(engine.accumulate(iter(Batches(3)), epochs=2))


def test_what_makes_no_update_is_refused():
    engine, _, _ = prepared(steps=4)
    with pytest.raises(ConfigError, match="loader yields no batch on this rank"):
        list(engine.accumulate([]))
    with pytest.raises(ConfigError) as caught:
        list(engine.accumulate(Sized(3)))
    assert str(caught.value) == (
        "loader yields 3 micro-batches on this rank, but one update takes 4 "
        "(accelerator.gradient_accumulation.steps). Use "
        "--accelerator.gradient_accumulation.steps 3 or less "
        "(GradientAccumulationConfig.steps), more data, or "
        "accumulate(loader, epochs=None), which continues past the end of the data."
    )
    for epochs in (0, -1, 1.5, "2", True):
        with pytest.raises(
            ConfigError, match=rf"epochs = {epochs!r}, but it must be an integer of at"
        ):
            engine.accumulate(Sized(3), epochs=epochs)
    for first in (-1, "a"):
        with pytest.raises(
            ConfigError, match=rf"first_epoch = {first!r}, but it must be an integer"
        ):
            engine.accumulate(Sized(3), first_epoch=first)


def steps_without_a_batch():
    engine, model, optimizer = prepared()
    window = list(Sized(1)) if engine.rank else []
    engine.step(model, optimizer, None, window, mean)


def test_an_update_without_a_micro_batch_is_refused_and_told_to_the_other_ranks():
    first, second = rank_outcomes(steps_without_a_batch, 2, init=False)
    assert (first.error_type, second.error_type) == ("ConfigError", "PeerError")
    for outcome in (first, second):
        assert "micro_batches is empty, but an update takes at least one." in outcome.error


def uneven(kinds, steps, epochs, by_step):
    """Updates of this rank and the numbers of its windows; rank r has 5 - r batches."""
    engine, model, optimizer = prepared(steps)
    loader = kinds[engine.rank % len(kinds)](5 - engine.rank)
    seen = []
    for window in engine.accumulate(loader, epochs=epochs):
        seen.append(int(window[0][0, 0]))
        if by_step:
            engine.step(model, optimizer, None, window, mean)
        else:
            for index in range(len(window)):
                with engine.micro_batch(model, index, len(window)):
                    engine.backward(mean(model, window[index]))
            engine.update(optimizer, None)
    return seen


def every_case():
    """All in one launch: starting ranks costs more than the cases."""
    cases = {
        "known": ([Sized], 1, 1, True),
        "unknown": ([Batches], 1, 1, True),
        "one of each": ([Sized, Batches], 1, 1, True),
        "unknown, own loop": ([Batches], 1, 1, False),
        "known, in windows of 3": ([Sized], 3, 2, True),
        "unknown, in windows of 3": ([Batches], 3, 2, True),
    }
    return {name: uneven(*case) for name, case in cases.items()}


def test_ranks_end_at_the_same_window_whatever_their_loaders_hold():
    first, second = run_ranks(every_case, 2, init=False)
    for name in ("known", "unknown", "one of each", "unknown, own loop"):
        assert first[name] == second[name] == [0, 1, 2, 3], name
    for name in ("known, in windows of 3", "unknown, in windows of 3"):
        assert (first[name], second[name]) == ([0, 3], [0, 3]), name


def rows_of_a_stream():
    engine, _, _ = prepared()
    return [len(window[0]) for window in engine.accumulate(DataLoader(Stream(), 2))]


def test_a_stream_of_torch_has_no_length():
    assert run_ranks(rows_of_a_stream, 2, init=False) == [[2, 1]] * 2


def ends_badly(kind):
    engine, model, optimizer = prepared(steps=2 if kind == "short" else 1)
    loader = {
        "empty": Sized(3 * engine.rank),
        "empty stream": Batches(3 * engine.rank),
        "short": Batches(1 + engine.rank),
        "boasting": (Boasting if engine.rank else Sized)(5 - 2 * engine.rank),
    }[kind]
    for window in engine.accumulate(loader):
        engine.step(model, optimizer, None, window, mean)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("empty", "loader yields no batch on rank 0."),
        ("empty stream", "loader yields no batch on rank 0."),
        ("short", "loader yields 1 micro-batches on rank 0, but one update takes 2"),
    ],
)
def test_a_rank_without_an_update_ends_all_ranks_alike(kind, error):
    for outcome in rank_outcomes(ends_badly, 2, kind, init=False):
        assert outcome.error_type == "ConfigError"
        assert error in outcome.error


def test_a_length_that_is_not_true_is_told_to_the_other_ranks():
    first, second = rank_outcomes(ends_badly, 2, "boasting", init=False)
    assert (first.error_type, second.error_type) == ("PeerError", "ConfigError")
    assert "loader has the length 5, but it ended after 3 micro-batches of 1 epochs" in first.error
