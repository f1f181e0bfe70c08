"""The sinks of one run: its metrics file, what the config asks for, and the console."""

from __future__ import annotations

from pathlib import Path

from parallel_train.config import SCHEMA, TrainConfig
from parallel_train.metrics.sinks import JsonlSink, Sinks, console_sink
from parallel_train.metrics.trackers import tracking_sinks


def open_sinks(config: TrainConfig, folder: Path, metrics: Path, start: int) -> Sinks:
    """Open every sink of a run that has done `start` updates. Only the main rank calls it.

    `metrics` is the file with a line per update in the run's `folder`.
    """
    others = tracking_sinks(config.logging, folder, start, SCHEMA.to_document(config))
    console = console_sink(steps=config.steps, start=start, log_freq=config.log_freq)
    # The console comes last: a progress bar that another sink's message interrupts looks torn.
    return Sinks([JsonlSink(metrics), *others, console])
