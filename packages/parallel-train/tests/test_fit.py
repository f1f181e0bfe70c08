"""Settings that do not fit the length of a run are said, with what they do instead."""

import pytest

from parallel_train.cli.parsing import parse
from parallel_train.run.fit import misfits


def lines(*words):
    return misfits(parse(["train", *words]).command.run)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 20 --scheduler.warmup_steps 1000", "scheduler.warmup_steps = 1,000, but the run "
         "has 20 updates: the learning rate never reaches 0.001 and ends at 2e-05. Use a smaller "
         "--scheduler.warmup_steps or more --steps"),
        ("--steps 20 --scheduler.warmup_steps 20", "ends at 0.000952"),
        ("--steps 20 --scheduler.decay_steps 15", "scheduler.decay_steps = 15, but the run has 20 "
         "updates: the learning rate is 0 from update 16 on, and nothing is trained there. Use "
         "--scheduler.decay_steps None (the length of the run) or a --scheduler.min_lr_ratio"),
        ("--steps 20 --scheduler.decay_steps 40", "scheduler.decay_steps = 40, but the run has 20 "
         "updates: the decay is cut off, and the learning rate ends at 0.000539"),
        ("--scheduler.type constant --scheduler.decay_steps 9 --scheduler.min_lr_ratio 0.1",
         "scheduler.decay_steps = 9 and scheduler.min_lr_ratio = 0.1 without effect: "
         "scheduler.type = constant does not decay. Use --scheduler.type cosine or linear"),
        ("--steps 20 --ema.decay 0.999 --no-ema.warmup", "ema.decay = 0.999 without ema.warmup: "
         "after 20 updates 98% of the average are still the first weights. Use --ema.warmup or a "
         "smaller --ema.decay"),
        ("--checkpoint.save_freq 100 --checkpoint.keep_every 150", "checkpoint.keep_every = 150 is "
         "not a multiple of checkpoint.save_freq = 100: only checkpoints whose step is a multiple "
         "of both are kept by it"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_remedy(words, message):
    (line,) = lines(*words.split())
    assert line == message or (
        message.startswith("ends") and line.split(". Use")[0].endswith(message)
    )


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--steps 20 --scheduler.warmup_steps 19",
        "--steps 20 --scheduler.decay_steps 20",
        "--steps 20 --scheduler.decay_steps 15 --scheduler.min_lr_ratio 0.1",
        "--steps 20 --ema.decay 0.999",
        "--checkpoint.save_freq 0 --checkpoint.keep_every 150",
    ],
)
def test_what_fits_is_not_said(words):
    assert lines(*words.split()) == []
