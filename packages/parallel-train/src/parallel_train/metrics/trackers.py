"""Sinks for TensorBoard and for Weights & Biases."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel_config import ConfigError, Problem
from parallel_train.config import LoggingConfig
from parallel_train.metrics.detached import DetachedSink
from parallel_train.metrics.sinks import Row, Sink

WANDB_ID = "wandb_run_id"
"""File in the run folder: a resumed run goes on under the same name there."""


def check_tracking(config: LoggingConfig) -> None:
    """Fail before anything is built or written, not when the first row is there.

    Raises:
        ConfigError: the package of a sink is not installed, or the user is not logged in there.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(
                Problem(
                    f"logging.{name}",
                    f"= True, but {name} is not installed.",
                    f'Use pip install "parallel-train[{name}]", or --no-logging.{name}.',
                )
            )
    # Offline nothing is sent, so no login is needed.
    if config.wandb and config.wandb_mode == "online":
        _require_login()


def _require_login() -> None:
    import wandb

    # Older versions ask a person whatever one wants, and newer ones warn of `wandb.api`.
    if "prompt" in inspect.signature(wandb.login).parameters:
        is_known = wandb.login(prompt=False, verify=False)
    else:
        is_known = bool(wandb.api.api_key)
    if not is_known:
        raise _no_wandb("you are not logged in.")


def _no_wandb(why: str) -> ConfigError:
    return ConfigError(
        Problem(
            "logging.wandb",
            f"= True, but Weights & Biases does not start: {why}",
            "Use `wandb login`, --logging.wandb_mode offline, or --no-logging.wandb.",
        )
    )


def is_unreachable(error: Exception) -> bool:
    """Whether the error of W&B's start is of the network or of its server.

    A wrong project or account is for the user to mend; a server that is down must not keep a job
    that starts at night from training.
    """
    import wandb

    if isinstance(error, wandb.errors.AuthenticationError):
        return False
    words = ("permission", "denied", "not found", "unauthorized", "401", "403", "404")
    text = str(error).lower()
    return isinstance(error, wandb.errors.CommError) and not any(word in text for word in words)


def tracking_sinks(
    config: LoggingConfig, folder: Path, start: int, document: Mapping[str, Any]
) -> list[Sink]:
    """The sinks that the config asks for.

    Args:
        config: which.
        folder: of the run.
        start: updates that were done before; what was logged of later ones is repeated.
        document: the run's config as plain values.
    """
    found: list[Sink] = []
    if config.tensorboard:
        writer = TensorBoardSink(folder / "tensorboard", start=start)
        found.append(DetachedSink(writer, "TensorBoard"))
    if config.wandb:
        try:
            found.append(DetachedSink(WandbSink(config, folder, document), "Weights & Biases"))
        except ConfigError:
            raise
        except Exception as error:  # of a library of others: it may be any
            why = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"Weights & Biases does not start, and is left out: {why}", flush=True)
    return found


class TensorBoardSink:
    """Event files; `tensorboard --logdir` shows them. Rows that a resume repeats are hidden."""

    def __init__(self, folder: Path, *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides rows from there on: the first update that this start repeats.
        self._writer: Any = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def emit(self, row: Row) -> None:
        """Write every number of the row under its name."""
        for name, value in numbers(row):
            self._writer.add_scalar(name, value, row.step)

    def note(self, line: str) -> None:
        """Notes are for people."""

    def close(self) -> None:
        """Write what is pending."""
        self._writer.close()


class WandbSink:
    """One run at Weights & Biases, gone on with when this one is resumed.

    Numbers are drawn over `step`, a value of ours: W&B's own counter refuses to go back, as a
    resume from an earlier step must.
    """

    def __init__(self, config: LoggingConfig, folder: Path, document: Mapping[str, Any]) -> None:
        import wandb

        known = folder / WANDB_ID
        if not known.exists():
            # Chosen here and not by W&B, so that it is on disk before anything is sent.
            known.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        start = functools.partial(
            wandb.init,
            id=known.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(folder),
            name=folder.name,
            project=config.wandb_project,
            entity=config.wandb_entity,
            config=dict(document),
            settings=wandb.Settings(console="off", silent=True),
        )
        try:
            self._run: Any = start(mode=config.wandb_mode)
        except wandb.Error as error:
            if not is_unreachable(error):
                raise _no_wandb(str(error)) from error
            print(
                f"Weights & Biases does not answer: {str(error).splitlines()[0]}. This run is "
                f"logged offline; `wandb sync {folder / 'wandb'}/offline-run-*` sends it later",
                flush=True,
            )
            # Its service still holds the id for the attempt that failed.
            wandb.teardown()
            self._run = start(mode="offline")
        self._run.define_metric("*", step_metric="step")

    def emit(self, row: Row) -> None:
        """Send every number of the row."""
        self._run.log({"step": row.step, **dict(numbers(row))})

    def note(self, line: str) -> None:
        """Notes are for people."""

    def close(self) -> None:
        """Send what is pending."""
        self._run.finish()


def numbers(row: Row) -> Iterator[tuple[str, float]]:
    """Everything in a row but its step, by name."""
    for name, value in vars(row).items():
        if name not in ("step", "extra"):
            yield name, value
    yield from row.extra.items()
