"""Sinks: what a person sees of a row, and what becomes of a sink that fails."""

import io
import json
import threading
from dataclasses import replace

import pytest

from parallel_train.metrics.detached import DetachedSink
from parallel_train.metrics.sinks import JsonlSink, LineSink, Row, Sinks

ROW = Row(step=3, loss=0.5, grad_norm=1.0, lr=1e-3, samples_seen=12, samples_per_s=7.0)


def test_a_skipped_update_is_seen_on_the_console():
    said = io.StringIO()
    sink = LineSink(steps=10, log_freq=1, stream=said)
    sink.emit(Row(**{**vars(ROW), "extra": {"accuracy": 0.25, "skipped": 1}}))
    assert said.getvalue().endswith("7 samples/s  accuracy 0.25  skipped 1\n")


def test_the_console_shows_the_first_the_last_and_every_evaluated_update_with_what_is_left():
    said = io.StringIO()
    sink = LineSink(steps=10, start=2, log_freq=4, stream=said)
    for step in range(3, 11):
        sink.emit(replace(ROW, step=step, extra={"eval_loss": 0.5} if step == 6 else {}))
    lines = said.getvalue().splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines] == ["3", "4", "6", "8", "10"]
    assert "eval_loss 0.5" in lines[2]
    # The pace is known from the second update on; after the last nothing is left.
    assert [" eta 0:00:0" in line for line in lines] == [False, True, True, True, False]


class Broken(LineSink):
    """Raises where it is told to, and keeps what it was handed."""

    def __init__(self, name, where, said=None):
        super().__init__(steps=10, log_freq=1, stream=said)
        self.name, self._where, self.calls = name, where, []

    def emit(self, row):
        self.calls.append("emit")
        if self._where == "emit":
            raise ConnectionError("the server is down")

    def close(self):
        self.calls.append("close")
        if self._where == "close":
            raise OSError(28, "No space left on device")


def test_a_sink_that_fails_is_given_up_once_and_the_others_go_on(tmp_path):
    said = io.StringIO()
    first, last = Broken("tracker", "emit"), Broken("events", "close")
    with Sinks(
        [JsonlSink(tmp_path / "m"), first, last, LineSink(steps=9, log_freq=1, stream=said)]
    ) as sinks:
        for step in (1, 2):
            sinks.emit(replace(ROW, step=step))
    assert [json.loads(line)["step"] for line in (tmp_path / "m").read_text().splitlines()] == [
        1,
        2,
    ]
    assert (first.calls, last.calls) == (["emit", "close"], ["emit", "emit", "close"])
    rest = " The run goes on, and metrics.jsonl holds every update."
    assert [line for line in said.getvalue().splitlines() if "given up" in line] == [
        f"tracker is given up: ConnectionError: the server is down.{rest}",
        f"events is given up: OSError: No space left on device.{rest}",
    ]


class FullStream(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_console_that_fails_in_a_run_is_said_on_stderr(capsys):
    with Sinks([LineSink(steps=9, log_freq=1, stream=FullStream())]) as sinks:
        sinks.emit(ROW)
        sinks.emit(ROW)
    assert capsys.readouterr().err == (
        "ptrain: the console is given up: OSError: No space left on device. The run goes on, and "
        "metrics.jsonl holds every update.\n"
    )


class Disk:
    """A disk that takes `room` bytes."""

    def __init__(self):
        self.room, self.data = 0, b""

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        self.data += taken
        return len(taken)

    def close(self):
        pass


def test_rows_wait_for_room_on_the_disk_and_none_is_torn(tmp_path):
    told, disk = [], Disk()
    sink = JsonlSink(tmp_path / "m")
    sink._file.close()
    sink._file, sink.tell = disk, told.append
    for step in range(6):
        if step == 3:
            disk.room = 150  # room for a row and a half
        sink.emit(replace(ROW, step=step))
    assert told == [
        "metrics.jsonl cannot be written (No space left on device): its rows wait in memory until "
        "it can, and the training goes on"
    ]
    with pytest.raises(OSError, match="5 updates are missing in it"):
        sink.close()
    disk.room = 10_000
    sink.close()
    assert [json.loads(line)["step"] for line in disk.data.splitlines()] == list(range(6))


def test_a_server_that_hangs_holds_up_neither_the_run_nor_its_end():
    never = threading.Event()

    class Hanging(Broken):
        def emit(self, row):
            never.wait(60)

    with Sinks([DetachedSink(Hanging("W&B", ""), "W&B", close_s=0.05)]) as sinks:
        sinks.emit(ROW)
    full = DetachedSink(Hanging("W&B", ""), "W&B", most_rows=2)
    with pytest.raises(TimeoutError, match="2 updates wait to be sent"):
        [full.emit(ROW) for _ in range(4)]
    never.set()
    failing = DetachedSink(Broken("W&B", "emit"), "W&B")
    failing.emit(ROW)
    with pytest.raises(ConnectionError, match="the server is down"):
        failing.close()
