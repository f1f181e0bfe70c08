"""Sends a run to the Hub, as the `publish` section of its config asks; else nothing at all.

No rank waits for the network in a collective: before the run the main rank asks the Hub a few
short questions; checkpoints are pushed by a thread of the main rank; at the end all ranks gather
the model into a folder, part, and the main rank sends it alone. Whatever fails there, the run's
checkpoints are whole, and the command that tries again is printed.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from parallel_config import Problem, ReportedError, Topology, agreed
from parallel_engine import together
from parallel_publish import (
    CardInfo,
    CheckpointPusher,
    PublishConfig,
    Staged,
    Target,
    preflight_publish,
    stage_trained_model,
)
from parallel_publish.bundle import num_bytes
from parallel_publish.client import without_bars
from parallel_publish.retry import Stop, never
from parallel_publish.staging import bundle_folder
from parallel_train.config import SCHEMA, TrainConfig
from parallel_train.data.metadata import Metadata
from parallel_train.hub.card import describe_run
from parallel_train.policies.factory import build_policy
from parallel_train.run.folder import RunFiles

STOP_WAIT_S = 10.0
"""How long a run that was asked to stop waits for a push under way."""


class RunPublisher:
    """The publishing side of one run; free and silent where nothing is to be published."""

    def __init__(
        self,
        config: TrainConfig,
        files: RunFiles,
        topology: Topology,
        *,
        is_main: bool,
        metadata: Callable[[], Metadata],
    ) -> None:
        """`metadata` reads the dataset's, for the size of the model."""
        self._config, self._files, self._topology = config, files, topology
        self._is_main, self._metadata = is_main, metadata
        self._pusher: CheckpointPusher | None = None
        self._staged: Staged | None = None
        self._failures: list[str] = []

    def check(self) -> None:
        """Collective: every rank. Find out before anything is built whether publishing will work.

        Raises:
            ReportedError: the same on every rank; says what to change.
        """
        publish = self._config.publish
        if not publish.wants_hub:
            return
        card = describe_run(self._config, repo_id=str(publish.repo_id))
        try:
            preflight_publish(
                publish,
                card=card,
                staging=self._files.path if publish.enable else None,
                needed_bytes=lambda: _model_bytes(self._config, self._metadata),
            )
        except ReportedError as error:
            # A run has a way out that `ptrain publish` has not: to train without publishing.
            problems = [*error.problems, _without(publish)]
            raise agreed(type(error)(problems, source=error.source)) from error
        without_bars()  # they would tear what the run prints
        # After the preflight: a thread for a place that refuses would be in vain.
        if self._is_main and publish.push_checkpoints:
            self._pusher = CheckpointPusher(Target.of_checkpoints(publish))

    def push(self, checkpoint: Path) -> None:
        """Have a committed checkpoint pushed in the background. Main rank; returns at once."""
        if self._pusher is not None:
            self._pusher.push(checkpoint)

    def stage(self, model: nn.Module, *, step: int, files: Mapping[str, bytes]) -> None:
        """Collective: every rank. Gather the model of `step` into a folder that waits to be sent.

        A failure does not raise, since the run itself ended well: `finish` prints it.
        """
        publish = self._config.publish
        if not publish.enable:
            return
        try:
            self._staged = stage_trained_model(
                model,
                publish,
                staging=bundle_folder(self._files.path, step, Target.of(publish)),
                card=together(lambda: self._card(step)),
                files=files,
                train_config=SCHEMA.dump(self._config),
            )
        except ReportedError as error:
            path = shlex.quote(str(self._files.last.absolute()))
            retry = f"ptrain publish {path} --repo_id {publish.repo_id}"
            self._failures.append(f"not published: {error}\n  retry: {retry}")

    def finish(self, stop: Stop = never) -> bool:
        """Send what waits and wait for what is under way; whether everything is on the Hub.

        No collective: the main rank calls it once the ranks have parted. Once `stop` is true it
        ends as soon as that harms nothing, and says what is left to do.
        """
        if self._staged is not None:
            self._send(self._staged, stop)
        if self._pusher is not None:
            wait_s = float(self._config.publish.timeout_s)
            for push in self._pusher.close(wait_s, stop=stop, stop_wait_s=STOP_WAIT_S):
                if push.error:
                    way = f"\n  retry: {push.retry}" if push.retry else ""
                    self._failures.append(f"not pushed: {push.name}: {push.error}{way}")
        for line in self._failures:
            print(line, file=sys.stderr, flush=True)
        return not self._failures

    def _send(self, staged: Staged, stop: Stop) -> None:
        print(f"publishing; if this is interrupted, run: {staged.retry}", flush=True)
        result = staged.send(stop=stop)
        if result.ok:
            # Only now: a bundle that was not sent is what the retry sends.
            shutil.rmtree(staged.folder, ignore_errors=True)
            print(result.render(), flush=True)
        else:
            self._failures.append(result.render())

    def _card(self, step: int) -> CardInfo | None:
        if not self._is_main:
            return None
        return describe_run(
            self._config,
            repo_id=str(self._config.publish.repo_id),
            topology=self._topology,
            step=step,
            metrics=self._files.metrics,
        )


def _without(publish: PublishConfig) -> Problem:
    """The way out that only a run has."""
    parts = {"enable": publish.enable, "push_checkpoints": publish.push_checkpoints}
    flags = " ".join(f"--publish.no-{name}" for name, is_on in parts.items() if is_on)
    return Problem("publish", ": a run can do without it.", f"Use {flags} to train all the same.")


def finished_hint(publish: PublishConfig, files: RunFiles) -> str:
    """For a run that was finished before this start: publishing belongs to the end of training."""
    if not publish.enable:
        return ""
    path = shlex.quote(str(files.path))
    return f"; to publish it: ptrain publish {path} --repo_id {publish.repo_id}"


def _model_bytes(config: TrainConfig, metadata: Callable[[], Metadata]) -> int:
    """Bytes of the weights, from a model without memory; 0 where the policy cannot be built so.

    The disk is looked at again when the model is gathered.
    """
    try:
        spec = metadata().policy_spec
        with torch.device("meta"):
            return num_bytes(build_policy(config.policy, spec))
    except Exception:  # building the policy for the run reports what is wrong with it
        return 0
