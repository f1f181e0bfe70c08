"""What only a GPU does, as far as a host can show it: torch's own calls are recorded.

`tests-gpu` shows the same on devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel_ckpt import read_start
from parallel_ckpt.load.resume import DEVICE_STREAM_DERIVED
from parallel_ckpt.save import background
from parallel_ckpt.save.background import Staging
from parallel_ckpt.state.rng import RngState
from small_runs import ONE, saver_of, small


class Device:
    """A stand-in for the random stream of a GPU, which is a generator of the host here."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stream = torch.Generator()
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state", self.stream.get_state)
        patch.setattr(torch.cuda, "set_rng_state", self.stream.set_state)
        patch.setattr(torch.cuda, "manual_seed", self.stream.manual_seed)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.stream))


def saved_by(root: Path, step: int = 3) -> Path:
    model, _ = small()
    with saver_of(root) as saver:
        return saver.save(step=step, samples_seen=0, model=model)


def first_draw(path: Path, device: Device, before: int) -> tuple[float, tuple[str, ...]]:
    """What the GPU draws after a resume, wherever its stream stood, and what the resume says."""
    device.stream.manual_seed(before)
    start = read_start(path, topology=ONE)
    start.restore_rng()
    return device.draw(), start.notes


def test_a_gpu_takes_a_derived_stream_from_a_checkpoint_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    of_three, of_four = saved_by(tmp_path / "a"), saved_by(tmp_path / "b", step=4)
    with monkeypatch.context() as patch:
        device = Device(patch)
        drawn, notes = first_draw(of_three, device, before=1)
        assert notes == (DEVICE_STREAM_DERIVED,)
        assert first_draw(of_three, device, before=2) == (drawn, notes)  # the same at every resume
        assert first_draw(of_four, device, before=1)[0] != drawn
    assert read_start(of_three, topology=ONE).notes == ()  # on the CPU nothing is missing


def test_a_gpu_goes_on_where_its_own_stream_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    path = saved_by(tmp_path)
    wanted = device.draw()
    assert first_draw(path, device, before=8) == (wanted, ())


def test_a_state_of_the_gpu_does_no_harm_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Device(patch)
        state = RngState.capture()
    assert "cuda" in state.tensors
    wanted = float(torch.rand(()))
    state.restore()
    assert float(torch.rand(())) == wanted


class OnGpu(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_staging_locks_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    empty = torch.empty

    def record(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(background, "PINNED_BYTES", 4096)
    staging = Staging()
    sources = [torch.full((n,), float(n)).as_subclass(OnGpu) for n in (257, 512, 1, 300, 0)]
    monkeypatch.setattr(torch, "empty", record)
    for _ in range(2):  # the second save fills the same buffers
        for number, source in enumerate(sources):
            copied = staging._fill(str(number), source)
            assert copied.tolist() == source.tolist()
    # 257 floats lock 2,048 bytes and 512 lock as many: nothing is left for the others.
    assert pinned == [True, True, False, False, False]


def test_staging_of_a_host_locks_nothing() -> None:
    assert not Staging()._fill("weight", torch.ones(3)).is_pinned()
