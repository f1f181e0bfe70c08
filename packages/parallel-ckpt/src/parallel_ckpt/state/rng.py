"""Random states of one rank: python, numpy, torch and its device, as tensors without pickles."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from parallel_ckpt.errors import DamagedCheckpoint


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
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
            raise DamagedCheckpoint.of("rng", f"is not a random state: {error}.") from error

    def _restore(self) -> None:
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
