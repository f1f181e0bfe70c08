"""Random states of one rank: python, numpy, torch and its device, as tensors without pickles."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_ckpt.formats.limits import shown


@dataclass(frozen=True)
class RngState:
    """All random streams of a rank at one moment."""

    tensors: Mapping[str, torch.Tensor]
    """As stored: `python.words`, `python.gauss`, `numpy.words`, `numpy.rest`, `torch`, `cuda`."""
    device_seed: int | None = None
    """Seeds the stream of a GPU that the state does not have; None leaves that stream alone."""

    @property
    def lacks_device(self) -> bool:
        """Whether this process uses a GPU whose stream was not captured, as by a run on the CPU."""
        return _has_cuda() and "cuda" not in self.tensors

    @classmethod
    def capture(cls) -> RngState:
        """Read the streams of this process; nothing is drawn from them."""
        _, words, gauss = random.getstate()
        legacy = np.random.get_state(legacy=False)
        state = legacy["state"]
        tensors = {
            "python.words": torch.tensor(words, dtype=torch.int64),
            "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
            "numpy.words": torch.tensor(
                [*state["key"].tolist(), int(state["pos"])], dtype=torch.int64
            ),
            "numpy.rest": torch.tensor(
                [legacy["has_gauss"], legacy["gauss"]],
                dtype=torch.float64,
            ),
            "torch": torch.get_rng_state(),
        }
        if _has_cuda():
            tensors["cuda"] = torch.cuda.get_rng_state()
        return cls(tensors)

    def restore(self) -> None:
        """Put the streams of this process to where they were.

        Raises:
            DamagedCheckpoint: a stream is missing or has another form.
        """
        try:
            self._restore()
        except (KeyError, ArithmeticError, ValueError, TypeError, RuntimeError) as error:
            raise DamagedCheckpoint.of("rng", f"is not a random state: {error}.") from error

    def _restore(self) -> None:
        # All streams are looked at before one is set: native code draws from some of them without
        # looking itself, and a position outside of its words would end the process.
        self._check()
        gauss = self.tensors["python.gauss"].tolist()
        words = tuple(self.tensors["python.words"].tolist())
        random.setstate((3, words, gauss[0] if gauss else None))
        *key, position = self.tensors["numpy.words"].tolist()
        has_gauss, cached = self.tensors["numpy.rest"].tolist()
        np.random.set_state(
            ("MT19937", np.array(key, dtype=np.uint32), position, int(has_gauss), cached)
        )
        torch.set_rng_state(self.tensors["torch"])
        if _has_cuda() and "cuda" in self.tensors:
            torch.cuda.set_rng_state(self.tensors["cuda"])
        elif _has_cuda() and self.device_seed is not None:
            # Otherwise it would stand where building the model has left it: alike on all ranks.
            torch.cuda.manual_seed(self.device_seed)

    def _check(self) -> None:
        for stream in ("python.words", "numpy.words"):
            words = _numbers(self.tensors, stream, torch.int64, _WORDS + 1)
            _require(0 <= words[-1] <= _WORDS, stream, f"is at word {words[-1]} of {_WORDS}")
            _require(all(0 <= word < 2**32 for word in words), stream, "has a word beyond 32 bits")
        gauss = self.tensors["python.gauss"]
        _numbers(self.tensors, "python.gauss", torch.float64, min(1, gauss.numel()))
        has_gauss, _ = _numbers(self.tensors, "numpy.rest", torch.float64, 2)
        _require(has_gauss in (0.0, 1.0), "numpy.rest", f"has {has_gauss} values kept, not 0 or 1")
        state = self.tensors["torch"]
        _numbers(self.tensors, "torch", torch.uint8, torch.get_rng_state().numel())
        # The legacy layout of torch's generator: seed, words left, whether seeded, next word.
        left, seeded = state[8:16].contiguous().view(torch.int32).tolist()
        following = int(state[16:24].contiguous().view(torch.int64))
        _require(1 <= left <= _WORDS, "torch", f"has {left} of {_WORDS} words left")
        _require(seeded in (0, 1), "torch", f"says {seeded}, not 0 or 1, of whether it is seeded")
        _require(0 <= following <= _WORDS, "torch", f"is at word {following} of {_WORDS}")
        # With one word left the words are made anew before the next draw.
        fits = left == 1 or left + following <= _WORDS + 1
        _require(fits, "torch", f"is at word {following} with {left} of {_WORDS} left")
        if _has_cuda() and "cuda" in self.tensors:
            _numbers(self.tensors, "cuda", torch.uint8, torch.cuda.get_rng_state().numel())


_WORDS = 624
"""Of a Mersenne twister, which all three libraries use."""


def _numbers(
    tensors: Mapping[str, torch.Tensor], stream: str, dtype: torch.dtype, count: int
) -> list[Any]:
    """The numbers of a stream, of which there are `count` in one dim."""
    found = tensors[stream]
    _require(
        found.dtype == dtype and tuple(found.shape) == (count,),
        stream,
        f"is {found.dtype} of shape {shown(tuple(found.shape))}, not {dtype} of shape ({count},)",
    )
    return found.tolist() if dtype != torch.uint8 else []


def _require(is_right: bool, stream: str, found: str) -> None:
    if not is_right:
        raise ValueError(f"{stream} {found}")


def derived_seed(seed: int, step: int, rank: int) -> int:
    """Seed of a rank whose streams are not stored: differs for each rank and step."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{step}/{rank}".encode()) % 2**63


@dataclass(frozen=True)
class DerivedRng:
    """Streams that are seeded anew, because the checkpoint has none for this rank."""

    seed: int

    def restore(self) -> None:
        """Seed every stream of this process."""
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)


def _has_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
