"""The loop: one report per optimizer update, on to the sinks, and a checkpoint when one is due."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parallel_ckpt import CheckpointSaver
from parallel_engine import Engine, EngineError, StepReport, evaluate_loss
from parallel_train.config import TrainConfig
from parallel_train.data.worker_deaths import worker_death
from parallel_train.metrics.costs import Waited, peak_memory_gb
from parallel_train.metrics.sinks import Row, Sinks, Stopwatch
from parallel_train.run.adapt import global_batch
from parallel_train.run.prepare import Prepared
from parallel_train.run.signals import StopRequest


@dataclass(frozen=True)
class Loop:
    """The rest of a run, from `start_step` updates on."""

    config: TrainConfig
    """With resolved degrees."""
    engine: Engine
    prepared: Prepared
    saver: CheckpointSaver
    sinks: Sinks
    train_config: str
    """Text that goes into every checkpoint."""
    model_files: dict[str, bytes]
    start_step: int
    start_samples: int
    data_sizes: Mapping[str, int | str]
    """Samples and episodes of the training data, for the checkpoints."""
    peak_samples_per_s: float | None = None
    """Throughput at 100% model FLOPs utilization, where it is known."""

    def run(self, stop: StopRequest, restore_rng: Callable[[], None] | None) -> int:
        """Collective: every rank. Train until the last step or a stop; returns the updates done.

        `restore_rng` is called once the first window is there, since starting a loader may draw
        random numbers.

        Raises:
            WorkerDeath: a loader worker of this rank has died.
            PeerError: another rank failed first, wherever that was: in reading data, in the
                update, in the evaluation, in a sink or in the save.
        """
        with self.engine.telling_peers():
            try:
                return self._run(stop, restore_rng)
            except (RuntimeError, OSError, EOFError) as error:
                # torch says so in the middle of whatever runs just then, or knows only of a
                # connection that broke.
                death = None if isinstance(error, EngineError) else worker_death()
                if death is None:
                    raise
                raise death from error

    def _run(self, stop: StopRequest, restore_rng: Callable[[], None] | None) -> int:
        step, watch = self.start_step, Stopwatch()
        if self.engine.any(stop.received is not None):
            return step  # asked while starting: there is nothing new to save
        windows = Waited(self.engine.accumulate(self.prepared.loader, epochs=None))
        for micro_batches in itertools.islice(windows, self.config.steps - self.start_step):
            if step == self.start_step and restore_rng is not None:
                restore_rng()
            report = self.engine.step(
                self.prepared.model,
                self.prepared.optimizer,
                self.prepared.scheduler,
                micro_batches,
                self.prepared.loss_fn,
                clip_norm=self.config.optimizer.clip_norm,
                stop=stop.is_asked,
            )
            step += 1
            seconds = watch.lap()
            stopping = report.stop
            found = self.evaluate() if self._evaluation_due(step, stopping) else {}
            self.sinks.emit(self._row(step, report, seconds, found | self._costs(windows.seconds)))
            if self._due(step) or stopping:
                self.save(step)
            watch.lap()  # evaluating and saving do not count as training time
            if stopping:
                break
        self.saver.wait()
        return step

    def _costs(self, data_s: float) -> dict[str, float]:
        """Of the main rank alone: asking the others would cost a collective per update."""
        return {"data_s": data_s, "peak_memory_gb": peak_memory_gb(self.engine.device)}

    def evaluate(self) -> dict[str, float]:
        """Collective: every rank. Loss and metrics on the held-out episodes, by name."""
        held_out = self.prepared.held_out
        assert held_out is not None
        with self.prepared.averaged():
            report = evaluate_loss(
                self.engine,
                self.prepared.model,
                held_out.loader,
                self.prepared.loss_fn,
                num_counted=held_out.num_counted,
                seed=self.config.seed,
            )
        return {f"eval_{n}": v for n, v in {"loss": report.loss, **report.metrics}.items()}

    def save(self, step: int) -> None:
        """Collective: every rank. Write the checkpoint of `step`."""
        with self.prepared.averaged():
            self.saver.save(
                step=step,
                samples_seen=self._samples(step),
                model=self.prepared.model,
                optimizer=self.prepared.optimizer,
                scheduler=self.prepared.scheduler,
                data_state={
                    "seed": self.config.seed,
                    "samples_seen": self._samples(step),
                    **self.data_sizes,
                },
                train_config=self.train_config,
                model_files=self.model_files,
            )

    def _evaluation_due(self, step: int, stopping: bool) -> bool:
        """At the last step in any case; a request to stop does not wait for others."""
        if self.prepared.held_out is None:
            return False
        return step == self.config.steps or (step % self.config.eval.freq == 0 and not stopping)

    def _due(self, step: int) -> bool:
        freq = self.config.checkpoint.save_freq
        return step == self.config.steps or (freq > 0 and step % freq == 0)

    def _samples(self, step: int) -> int:
        batch = global_batch(self.config, self.engine.topology)
        return self.start_samples + (step - self.start_step) * batch

    def _row(
        self, step: int, report: StepReport, seconds: float, found: Mapping[str, float]
    ) -> Row:
        samples_per_s = global_batch(self.config, self.engine.topology) / max(seconds, 1e-9)
        extra: dict[str, float] = {**report.metrics, **found}
        if self.peak_samples_per_s is not None:
            extra["mfu"] = samples_per_s / self.peak_samples_per_s
        if report.skipped:
            extra["skipped"] = 1
        return Row(
            step=step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            samples_seen=self._samples(step),
            samples_per_s=samples_per_s,
            extra=extra,
        )
