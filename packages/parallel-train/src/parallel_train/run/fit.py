"""What of a config does not fit the length of its run: said at the start, never found out later."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_train.config import TrainConfig


def misfits(config: TrainConfig) -> list[str]:
    """A line for each setting that does not do what it says within this number of updates.

    They are not errors: a short trial of a long run's config is what people do.
    """
    return [*_schedule(config), *_average(config), *_times(config)]


def _schedule(config: TrainConfig) -> Iterator[str]:
    schedule, steps, peak = config.scheduler, config.steps, config.optimizer.lr

    def rate(update: int) -> str:
        return f"{peak * schedule.factor(update, total_steps=steps):.3g}"

    if schedule.warmup_steps >= steps:
        yield (
            f"scheduler.warmup_steps = {schedule.warmup_steps:,}, but the run has {steps:,} "
            f"updates: the learning rate never reaches {peak:g} and ends at {rate(steps - 1)}. Use "
            "a smaller --scheduler.warmup_steps or more --steps"
        )
    if schedule.type == "constant":
        unread = [
            f"scheduler.{name} = {value}"
            for name, value, default in (
                ("decay_steps", schedule.decay_steps, None),
                ("min_lr_ratio", schedule.min_lr_ratio, 0.0),
            )
            if value != default
        ]
        if unread:
            yield (
                f"{' and '.join(unread)} without effect: scheduler.type = constant does not decay. "
                "Use --scheduler.type cosine or linear"
            )
        return
    end = schedule.decay_steps
    if end is not None and end < steps and schedule.min_lr_ratio == 0:
        yield (
            f"scheduler.decay_steps = {end:,}, but the run has {steps:,} updates: the learning "
            f"rate is 0 from update {end + 1:,} on, and nothing is trained there. Use "
            "--scheduler.decay_steps None (the length of the run) or a --scheduler.min_lr_ratio"
        )
    elif end is not None and end > steps > schedule.warmup_steps:
        yield (
            f"scheduler.decay_steps = {end:,}, but the run has {steps:,} updates: the decay is cut "
            f"off, and the learning rate ends at {rate(steps - 1)}"
        )


def _average(config: TrainConfig) -> Iterator[str]:
    decay = config.ema.decay
    # With the warm-up a young average forgets fast, whatever the decay.
    if decay is None or config.ema.warmup:
        return
    first = decay**config.steps
    if first > 0.1:
        yield (
            f"ema.decay = {decay} without ema.warmup: after {config.steps:,} updates {first:.0%} "
            "of the average are still the first weights. Use --ema.warmup or a smaller --ema.decay"
        )


def _times(config: TrainConfig) -> Iterator[str]:
    keep, save = config.checkpoint.keep_every, config.checkpoint.save_freq
    # The last checkpoint of a run is written wherever it falls.
    if keep is not None and save > 0 and keep % save:
        yield (
            f"checkpoint.keep_every = {keep:,} is not a multiple of checkpoint.save_freq = "
            f"{save:,}: only checkpoints whose step is a multiple of both are kept by it"
        )
