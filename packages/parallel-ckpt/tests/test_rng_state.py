"""Random states from a file: what native code draws from is checked before it is set."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from parallel_ckpt import DamagedCheckpoint
from parallel_ckpt.state.rng import RngState


def put(stream: str, at: int, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[stream][at] = value

    return change


def number(at: int, dtype: torch.dtype, value: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """A number in the bytes of torch's own state."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["torch"][at : at + dtype.itemsize].view(dtype)[0] = value

    return change


def cut(stream: str, length: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[stream] = tensors[stream][:length].clone()

    return change


CASES = {
    "numpy's position": (put("numpy.words", -1, 2**31 - 1), r"numpy\.words is at word 2147483647"),
    "just beyond": (put("numpy.words", -1, 625), r"numpy\.words is at word 625 of 624"),
    "below": (put("numpy.words", -1, -1), r"numpy\.words is at word -1 of 624"),
    "numpy's word": (put("numpy.words", 0, 2**32), r"numpy\.words has a word beyond 32 bits"),
    "python's position": (put("python.words", -1, 625), r"python\.words is at word 625"),
    "python's word": (put("python.words", 3, -1), r"python\.words has a word beyond 32 bits"),
    "python's length": (cut("python.words", 624), r"python\.words is torch\.int64 of shape \(624"),
    "numpy's length": (cut("numpy.words", 0), r"numpy\.words is torch\.int64 of shape \(0,\)"),
    "numpy's rest": (put("numpy.rest", 0, float("nan")), r"numpy\.rest has nan values kept"),
    "torch's length": (cut("torch", 5055), r"torch is torch\.uint8 of shape \(5055,\)"),
    "torch's left": (number(8, torch.int32, 0), "torch has 0 of 624 words left"),
    "torch's seeded": (number(12, torch.int32, 7), "torch says 7, not 0 or 1"),
    "torch's next": (number(16, torch.int64, -1), "torch is at word -1 of 624"),
    "torch's two": (
        number(8, torch.int64, 624 | 1 << 32),
        "torch is at word 3 with 624 of 624 left",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_state_that_native_code_would_follow_is_refused(case: str) -> None:
    torch.manual_seed(0)
    torch.rand(3)
    tensors = {name: tensor.clone() for name, tensor in RngState.capture().tensors.items()}
    change, words = CASES[case]
    change(tensors)
    before = RngState.capture()
    with pytest.raises(DamagedCheckpoint, match=f"rng is not a random state: {words}"):
        RngState(tensors).restore()
    for name, tensor in RngState.capture().tensors.items():
        assert torch.equal(tensor, before.tensors[name]), name


@pytest.mark.parametrize("draws", [0, 1, 5, 623, 624, 625, 3119, 3120])
def test_every_genuine_state_is_taken(draws: int) -> None:
    torch.manual_seed(draws)
    np.random.seed(draws)
    random.seed(draws)
    torch.rand(draws)
    np.random.rand(draws)
    np.random.randn(draws % 2)
    for _ in range(draws):
        random.random()
    random.gauss(0, 1)
    state = RngState.capture()
    wanted = float(torch.rand(())), np.random.rand(), random.gauss(0, 1)
    state.restore()
    assert (float(torch.rand(())), np.random.rand(), random.gauss(0, 1)) == wanted
