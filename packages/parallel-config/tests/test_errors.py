"""Errors that a person reads: their text, and their way to another process."""

import pickle

import pytest

from parallel_config import ConfigError, Problem, ReportedError, agreed, is_agreed


class OutOfReach(ReportedError):
    """A base of its own, as each package has one."""


def test_a_reported_error_is_wrong_input_only_as_a_config_error():
    assert not issubclass(ReportedError, ValueError)
    assert issubclass(ConfigError, ReportedError)
    assert issubclass(ConfigError, ValueError)


def test_one_line_per_problem_path_first():
    error = ReportedError([Problem("a.b", "= 1.", "Use 2."), Problem("file", ": is empty.")])
    assert str(error) == "a.b = 1. Use 2.\nfile: is empty."


def test_with_a_source_the_problems_are_counted_and_indented():
    error = ReportedError(Problem("a", "is missing."), source="run.toml")
    assert str(error) == "run.toml: 1 problem\n  a is missing."


def test_of_makes_an_error_of_the_class_that_it_is_called_on():
    error = OutOfReach.of("user/name", "cannot be read.", "Try again later.")
    assert type(error) is OutOfReach
    assert str(error) == "user/name cannot be read. Try again later."


@pytest.mark.parametrize("kind", [ReportedError, ConfigError, OutOfReach])
def test_a_pickled_copy_has_the_class_the_problems_and_the_source(kind):
    error = kind([Problem("a", "= 1.", "Use 2."), Problem("b", "= 3.")], source="run.toml")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.problems, copy.source) == (kind, error.problems, "run.toml")
    assert str(copy) == str(error)


def test_only_an_error_that_was_marked_counts_as_raised_on_every_rank():
    assert not is_agreed(ReportedError.of("a", "= 1."))
    assert is_agreed(agreed(ReportedError.of("a", "= 1.")))
