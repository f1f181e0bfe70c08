"""`ptrain evaluate`: success rates of a trained policy in simulation."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_config import ConfigError, ReportedError
from parallel_train.cli.commands import EvaluateCommand
from parallel_train.cli.exits import DONE, WRONG_INPUT, fail
from parallel_train.cli.parsing import Parsed

if TYPE_CHECKING:
    import torch

    from parallel_train.sim.evaluate import Played, SuccessRate

RESULTS = "results.json"


def run(parsed: Parsed) -> int:
    """Print and keep a line per task and controller at once. Returns 0, or 2 for wrong input."""
    command: EvaluateCommand = parsed.command
    # Looked for without an import, which takes seconds.
    if importlib.util.find_spec("metaworld") is None:
        print('ptrain evaluate needs MetaWorld: pip install "parallel-train[sim]"', file=sys.stderr)
        return WRONG_INPUT
    try:
        _evaluate(command)
    except ReportedError as error:
        return fail(error, "ptrain evaluate")
    return DONE


def _evaluate(command: EvaluateCommand) -> None:
    from parallel_train.policies.loading import load_policy
    from parallel_train.sim.evaluate import evaluate_policy

    loaded = load_policy(command.path, command.policy_type)
    pictures = Pictures(_output_folder(command), command.seed)
    results: list[SuccessRate] = []
    text = ""

    def take(result: SuccessRate) -> None:
        nonlocal text
        results.append(result)
        text = _document(command, results, pictures)
        pictures.folder.mkdir(parents=True, exist_ok=True)
        # After every result: hours of rollouts must not be lost with the process.
        (pictures.folder / RESULTS).write_text(text + "\n", encoding="utf-8")
        if not command.json:
            print(result, flush=True)

    evaluate_policy(
        loaded.model.to(_device()),
        loaded.preprocessor,
        loaded.spec,
        list(command.tasks),
        episodes=command.episodes,
        seed=command.seed,
        max_steps=command.max_steps,
        on_result=take,
        on_episode=pictures.take,
    )
    if command.json:
        print(text)
    else:
        if pictures.note:
            print(pictures.note)
        files = ", ".join([RESULTS, *pictures.names])
        print(f"kept in {pictures.folder}: {files}")


def _document(command: EvaluateCommand, results: Sequence[SuccessRate], pictures: Pictures) -> str:
    document = {
        "policy": command.path,
        "seed": command.seed,
        "max_steps": command.max_steps,
        "results": [result.to_plain() for result in results],
        "pictures": pictures.names,
    }
    return json.dumps(document, indent=2)


class Pictures:
    """Keeps the policy's first solved and first failed episode of each task: rendered where this
    machine can, otherwise drawn.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        from parallel_train.sim.render import Renderer

        self.folder, self._seed = folder, seed
        self.names: list[str] = []
        self._renderer = Renderer()

    @property
    def note(self) -> str:
        """A line for the user where pictures are not rendered."""
        why_not = self._renderer.why_not
        return f"{why_not}: pictures are drawn from the observations" if why_not else ""

    def take(self, played: Played) -> None:
        """Keep the episode if it is the first of its kind."""
        from parallel_train.sim.draw import draw_rollout

        task, number, rollout = played.task, played.number, played.rollout
        end = "solved" if rollout.success else "failed"
        name = f"{task}_{end}.gif"
        # Expert and chance are there for the numbers.
        if played.controller != "policy" or name in self.names:
            return
        path, title = self.folder / name, f"{task}, episode {number}: {end}"
        if not self._renderer.render(task, self._seed, number, rollout.actions, path, title):
            draw_rollout(rollout, path, title)
        self.names.append(name)


def _output_folder(command: EvaluateCommand) -> Path:
    from parallel_ckpt import resolve_checkpoint

    if command.output is not None:
        return Path(command.output).expanduser()
    try:
        step = resolve_checkpoint(command.path)
    except ConfigError:  # a converted folder, or the Hub's
        return Path("evaluations") / Path(command.path).name
    return step.parent.parent / "evaluations" / step.name


def _device() -> torch.device:
    import torch

    from parallel_config.environment import requested_device

    best = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(requested_device() or best)
