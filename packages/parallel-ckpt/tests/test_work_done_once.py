"""A save looks at everything once: who owns a box, the optimizer's state, the model."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from parallel_ckpt import CheckpointSaver
from parallel_ckpt.state import model as model_state
from parallel_ckpt.state import shards
from parallel_config import CheckpointConfig, CheckpointFormat, Topology


@contextmanager
def calls_of(*functions: Any) -> Iterator[Counter[str]]:
    """How often each function is called meanwhile, by name, in whatever thread."""
    names: dict[CodeType, str] = {function.__code__: function.__name__ for function in functions}
    found: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in names:
            found[names[frame.f_code]] += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Walked(dict[Any, Any]):
    """An optimizer's state that counts how often it is walked."""

    walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("form", CheckpointFormat)
def test_a_save_divides_the_boxes_once(
    form: CheckpointFormat, async_save: bool, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state = Walked(optimizer.state)
    config = CheckpointConfig(async_save=async_save)
    with (
        CheckpointSaver(
            tmp_path, topology=Topology(), checkpoint_format=form, config=config
        ) as saver,
        calls_of(shards.owners, model_state.named_tensors) as calls,
    ):
        saver.save(step=1, samples_seen=1, model=model, optimizer=optimizer)
        saver.wait()
    assert calls == {"owners": 2, "named_tensors": 1}  # of the weights, and of the optimizer
    assert optimizer.state.walks == 1
