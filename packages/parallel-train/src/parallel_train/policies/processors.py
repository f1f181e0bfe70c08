"""Normalizes between dataset and policy, and is saved with the model.

The preprocessor turns a batch of the dataset into what the policy reads; the postprocessor turns
the policy's actions back. Both are read from the same two files, so they cannot disagree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_config import ConfigError, Problem
from parallel_train.data.spec import ACTION
from parallel_train.data.stats import Stats, mode_of

CONFIG_FILE = "preprocessor.json"
TENSOR_FILE = "preprocessor.safetensors"
FORMAT_VERSION = 1
MODES = ("mean_std", "min_max", "identity")


@dataclass(frozen=True)
class Normalizer:
    """The map x -> (x - shift) / scale, entry by entry."""

    mode: str
    """mean_std: to mean 0 and deviation 1; min_max: to [-1, 1]."""
    shift: Tensor
    """Shape of one frame's value."""
    scale: Tensor
    """Same shape; 1 where the data is constant, which thus becomes 0 instead of noise."""
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Shift and scale by device: a copy from the host holds up every batch until it is there."""

    @classmethod
    def from_stats(cls, mode: str, stats: Stats) -> Normalizer:
        """The normalizer of a feature with these statistics, computed in float64."""
        low, high = torch.from_numpy(stats.min).double(), torch.from_numpy(stats.max).double()
        if mode == "mean_std":
            shift, scale = torch.from_numpy(stats.mean), torch.from_numpy(stats.std)
        elif mode == "min_max":
            shift, scale = (low + high) / 2, (high - low) / 2
        else:
            raise ValueError(f"mode = {mode!r}, known: {', '.join(MODES)}")
        # What float32 rounding alone makes of a constant must not be blown up to deviation 1.
        noise = 1e-6 * torch.maximum(low.abs(), high.abs()).clamp(min=1e-2)
        constant = scale.double() <= noise
        scale = torch.where(constant, 1.0, scale.double())
        return cls(mode, shift.float(), scale.float())

    def __call__(self, value: Tensor) -> Tensor:
        """Normalize; leading dims are free."""
        shift, scale = self._beside(value)
        return (value - shift) / scale

    def inverse(self, value: Tensor) -> Tensor:
        """Undo it."""
        shift, scale = self._beside(value)
        return value * scale + shift

    def _beside(self, value: Tensor) -> tuple[Tensor, Tensor]:
        device = value.device
        if device not in self._copies:
            # Ordinary tensors, also where the first batch comes in inference mode: the next may
            # be one of training.
            with torch.inference_mode(False):
                self._copies[device] = self.shift.to(device), self.scale.to(device)
        return self._copies[device]


@dataclass(frozen=True)
class Preprocessor:
    """From a dataset's batch to a policy's: rename, move to the device, normalize.

    Pictures come as uint8 and leave as float32, scaled to [0, 1] before they are normalized. What
    has the policy's name already keeps it, so that a robot may use either.
    """

    normalizers: Mapping[str, Normalizer] = field(default_factory=dict)
    """By the feature's name after renaming."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """The batch's name to the policy's."""

    @classmethod
    def from_stats(
        cls,
        stats: Mapping[str, Stats],
        modes: Mapping[str, str],
        rename: Mapping[str, str] | None = None,
    ) -> Preprocessor:
        """Build from a dataset's statistics.

        `modes` gives the mode by feature or by prefix, the longest match decides
        (`PolicyConfig.normalization`); features without a match pass unchanged.
        """
        rename = dict(rename or {})
        normalizers: dict[str, Normalizer] = {}
        for name, values in stats.items():
            target = rename.get(name, name)
            mode = mode_of(target, modes)
            if mode != "identity":
                normalizers[target] = Normalizer.from_stats(mode, values)
        return cls(normalizers, rename)

    def __call__(
        self, batch: Mapping[str, Any], device: torch.device | None = None
    ) -> dict[str, Any]:
        """A new batch; `<feature>_is_pad` follows its feature's new name.

        Values that are not tensors, such as the texts of tasks, pass unchanged.

        Raises:
            ValueError: the batch has a feature under both of its names.
        """
        result: dict[str, Any] = {}
        for name, value in batch.items():
            target = self._renamed(name)
            if target in result:
                raise ValueError(f"the batch has {target!r} twice: renamed, and under that name")
            if not isinstance(value, Tensor):
                result[target] = value
                continue
            # Only towards a device: a copy to the host would be read before it has arrived.
            behind = device is not None and torch.device(device).type != "cpu"
            moved = value if device is None else value.to(device, non_blocking=behind)
            if moved.dtype == torch.uint8:
                moved = moved.float() / 255  # pictures travel as bytes and are read as [0, 1]
            normalizer = self.normalizers.get(target)
            result[target] = moved if normalizer is None else normalizer(moved)
        return result

    def postprocessor(self) -> Postprocessor:
        """What undoes this on actions."""
        return Postprocessor(self.normalizers.get(ACTION))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `preprocessor.json` and `preprocessor.safetensors` into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, normalizer in self.normalizers.items():
            # safetensors refuses tensors that are not contiguous.
            tensors[f"{name}/shift"] = normalizer.shift.contiguous()
            tensors[f"{name}/scale"] = normalizer.scale.contiguous()
        save_file(tensors, folder / TENSOR_FILE)
        plain = {
            "format_version": FORMAT_VERSION,
            "rename": dict(self.rename),
            "modes": {name: normalizer.mode for name, normalizer in self.normalizers.items()},
        }
        (folder / CONFIG_FILE).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Preprocessor:
        """Read what `save_pretrained` wrote.

        Raises:
            ConfigError: a file is missing, damaged or of a newer format.
        """
        folder = Path(folder)
        plain, tensors = _read(folder)
        try:
            normalizers = {
                name: Normalizer(mode, tensors[f"{name}/shift"], tensors[f"{name}/scale"])
                for name, mode in plain["modes"].items()
            }
            return cls(normalizers, dict(plain["rename"]))
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise _error(folder, f"its two files disagree: {error!r}.") from error

    def _renamed(self, name: str) -> str:
        # Padding is named by its feature, so it is renamed with it.
        base = name.removesuffix("_is_pad")
        return self.rename.get(base, base) + name[len(base) :]


@dataclass(frozen=True)
class Postprocessor:
    """From a policy's actions to the robot's."""

    normalizer: Normalizer | None
    """The one of the actions; None leaves them as they are."""

    def __call__(self, action: Tensor) -> Tensor:
        """Actions in the dataset's units; leading dims are free."""
        return action if self.normalizer is None else self.normalizer.inverse(action)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Postprocessor:
        """Read from the files of the preprocessor in `folder`."""
        return Preprocessor.from_pretrained(folder).postprocessor()


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        # utf-8-sig: editors on Windows put a byte order mark in front of a file that was mended by
        # hand.
        plain = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8-sig"))
        tensors = load_file(folder / TENSOR_FILE)
    except OSError as error:
        raise _error(folder, f"cannot be read: {error}.") from error
    except (ValueError, SafetensorError) as error:
        raise _error(folder, f"is damaged: {error}.") from error
    version = plain.get("format_version") if isinstance(plain, dict) else None
    if version != FORMAT_VERSION:
        raise _error(
            folder, f"has format_version = {version!r}, but {FORMAT_VERSION} is read here."
        )
    return plain, tensors


def _error(folder: Path, message: str) -> ConfigError:
    return ConfigError(
        Problem(str(folder / CONFIG_FILE), message, "Use the folder that the model was saved into.")
    )
