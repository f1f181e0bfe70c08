"""Changes pictures at random while training: a pure function of (seed, position in the stream).

A resumed run, on any number of ranks and loader workers, sees the same pictures. The transforms and
their ranges are LeRobot's `ImageTransforms`; held-out frames are never changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from parallel_config import ConfigError, Problem
from parallel_train.data.config import ImageTransformsConfig
from parallel_train.data.lerobot import Batch, LeRobotDataset
from parallel_train.data.order import Samples, key_of, uniform


class Augmented(Dataset[Batch]):
    """A dataset whose cameras are changed at random, sample by sample.

    All frames of one camera in one sample are changed alike; cameras are drawn for independently.

    Args:
        dataset: Of pictures uint8 [..., 3, height, width].
        config: What is drawn from.
        seed: Of the run.

    Raises:
        ConfigError: no camera is read, or torchvision is not installed.
    """

    def __init__(self, dataset: LeRobotDataset, config: ImageTransformsConfig, seed: int) -> None:
        if not dataset.camera_names:
            raise ConfigError(
                Problem(
                    "dataset.image_transforms.enable",
                    "= True, but the policy does not read a camera.",
                    "Use --policy.cameras, or leave the transforms out.",
                )
            )
        self._dataset, self._seed = dataset, seed
        self._transforms = ImageTransforms(config)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, samples: Sequence[int]) -> Batch:
        """A whole batch at once, of samples that know their place in the stream."""
        assert isinstance(samples, Samples), "an order of samples gives their positions too"
        batch = self._dataset.__getitems__(samples)
        for camera in self._dataset.camera_names:
            # By its name: a camera more or less leaves the others as they were.
            number = zlib.crc32(camera.encode())
            changed = [
                self._transforms(pictures, key_of(self._seed, samples.first + place, number))
                for place, pictures in enumerate(batch[camera])
            ]
            batch[camera] = torch.stack(changed)
        return batch


class ImageTransforms:
    """Applies a random subset of transforms by torchvision, each with an amount from its range.

    Raises:
        ConfigError: torchvision is not installed.
    """

    def __init__(self, config: ImageTransformsConfig) -> None:
        self._functional = _functional()
        self._config = config
        self._ranges = config.ranges
        self._weights = np.array([config.weights.get(name, 1.0) for name in self._ranges])

    def __call__(self, pictures: Tensor, key: np.uint64) -> Tensor:
        """Pictures uint8 [..., 3, height, width], all changed in the same way; `key` decides it."""
        names = tuple(self._ranges)
        # Four numbers for each transform: whether it is chosen, and up to three amounts.
        draws = uniform(key, 4 * len(names)).reshape(len(names), 4)
        for place in self._chosen(draws[:, 0]):
            pictures = self._apply(names[place], pictures, draws[place, 1:])
        return pictures

    def _chosen(self, draws: npt.NDArray[np.float64]) -> list[int]:
        # The largest of u ** (1 / weight) are a draw by weight without replacement, in its order
        # (Efraimidis and Spirakis, 2006). The logarithm keeps small weights apart.
        with np.errstate(divide="ignore"):
            ranks = np.log(draws) / self._weights
        order = [int(place) for place in np.argsort(-ranks, kind="stable")]
        chosen = [place for place in order if self._weights[place] > 0]
        chosen = chosen[: self._config.max_num_transforms]
        return chosen if self._config.random_order else sorted(chosen)

    def _apply(self, name: str, pictures: Tensor, draws: npt.NDArray[np.float64]) -> Tensor:
        low, high = self._ranges[name]
        amount = float(low + draws[0] * (high - low))
        if name != "affine":
            changed: Tensor = getattr(self._functional, f"adjust_{name}")(pictures, amount)
            return changed
        height, width = pictures.shape[-2:]
        across, down = self._config.translate
        # From -1 to 1 of the largest shift, in whole pixels as torchvision's RandomAffine has it.
        shift = [
            round((2 * float(draw) - 1) * share * size)
            for draw, share, size in zip(draws[1:], (across, down), (width, height), strict=True)
        ]
        moved: Tensor = self._functional.affine(
            pictures, angle=amount, translate=shift, scale=1.0, shear=[0.0, 0.0]
        )
        return moved


def _functional() -> Any:
    try:
        from torchvision.transforms.v2 import functional
    except ImportError as error:
        raise ConfigError(
            Problem(
                "dataset.image_transforms.enable",
                f"= True, but torchvision, which changes the pictures, cannot be imported "
                f"({error}).",
                'Install the extra: pip install "parallel-train[vision]".',
            )
        ) from error
    return functional
