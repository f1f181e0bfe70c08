"""Sinks: what a person sees of a row, and that all of them are closed."""

import io

import pytest

from parallel_train.metrics.sinks import LineSink, Row, Sinks

ROW = Row(step=3, loss=0.5, grad_norm=1.0, lr=1e-3, samples_seen=12, samples_per_s=7.0)


def test_a_skipped_update_is_seen_on_the_console():
    said = io.StringIO()
    sink = LineSink(steps=10, log_freq=1, stream=said)
    sink.emit(Row(**{**vars(ROW), "extra": {"accuracy": 0.25, "skipped": 1}}))
    assert said.getvalue().endswith("7 samples/s  accuracy 0.25  skipped 1\n")


class Broken(LineSink):
    def __init__(self, name, closed):
        super().__init__(steps=1, log_freq=1)
        self._name, self._closed = name, closed

    def close(self):
        self._closed.append(self._name)
        raise OSError(28, f"No space left for {self._name}")


def test_every_sink_is_closed_although_one_cannot_be():
    closed = []
    with (
        pytest.raises(OSError, match="No space left for"),
        Sinks([Broken(name, closed) for name in "abc"]),
    ):
        pass
    assert closed == ["a", "b", "c"]
    with (
        pytest.raises(ValueError, match="the run's own"),
        Sinks([Broken(name, closed) for name in "abc"]),
    ):
        raise ValueError("the run's own")
    assert closed == ["a", "b", "c"] * 2
