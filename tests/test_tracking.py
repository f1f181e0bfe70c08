"""TensorBoard and W&B show what metrics.jsonl holds, through a resume from an earlier step."""

import sys

import pytest

from parallel_config import ConfigError
from parallel_train.config import LoggingConfig
from parallel_train.metrics import trackers as tracking


def test_tensorboard_and_wandb_show_the_rows(ptrain, small):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ["--logging.tensorboard", "--logging.wandb", "--logging.wandb_mode", "offline"]
    flags += ["--steps", 4, "--checkpoint.save_freq", 2]
    ptrain("train", *small, *flags, "--output_dir", "run")
    name = (ptrain.folder / "run/wandb_run_id").read_text()
    ptrain("resume", "run/checkpoints/000002", "--seed", 9)
    rows = ptrain.rows("run")
    events = EventAccumulator(str(ptrain.folder / "run/tensorboard")).Reload()
    for key in ("loss", "lr", "grad_norm", "samples_seen", "l1_loss"):
        shown = [(event.step, pytest.approx(event.value)) for event in events.Scalars(key)]
        assert shown == [(row["step"], row[key]) for row in rows]
    runs = sorted((ptrain.folder / "run/wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert all(run.name.endswith(name) for run in runs)
    assert b"l1_loss" in next(runs[0].glob("*.wandb")).read_bytes()


def test_a_sink_that_is_not_installed_is_said_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"parallel-train\[wandb\]"):
        tracking.check_tracking(LoggingConfig(wandb=True))
    tracking.check_tracking(LoggingConfig())


def test_wandb_without_an_account_says_what_to_do(ptrain, small):
    environ = {"WANDB_API_KEY": "", "HOME": str(ptrain.folder), "NETRC": str(ptrain.folder / "no")}
    flags = ["--logging.wandb", "--steps", 1, "--output_dir", "run"]
    text = ptrain("train", *small, *flags, code=2, env=environ)
    assert "logging.wandb = True" in text
    assert "wandb login" in text
    assert not (ptrain.folder / "run").exists()


@pytest.mark.parametrize(
    ("kind", "text", "goes_on"),
    [
        ("CommError", "Run initialization has timed out after 90.0 sec.", True),
        ("CommError", "could not resolve host: api.wandb.ai", True),
        ("CommError", "permission denied (Error 403: Forbidden)", False),
        ("CommError", "entity team not found during upsertBucket", False),
        ("AuthenticationError", "invalid key", False),
        ("UsageError", "project name too long", False),
    ],
)
def test_a_server_that_is_down_is_not_wrong_input(kind, text, goes_on):
    import wandb

    assert tracking.is_unreachable(getattr(wandb.errors, kind)(text)) is goes_on
