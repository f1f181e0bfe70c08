"""A ResNet that turns pictures into tokens (the `vision` extra).

Shape suffixes: B batch, C channels, H height, W width (both of the feature map), D model width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parallel_config import ConfigError, Problem
from parallel_train.data.spec import DataSpec
from parallel_train.policies.transformer import sinusoids


class ImageTokens(nn.Module):
    """Tokens of a camera's picture: the last feature map of a ResNet, place by place.

    All cameras share the network. It begins at random; `load_pretrained` replaces that by the
    weights named `weights`.

    Without pretrained weights the norms are group norms: batch statistics of a small micro-batch
    on every rank for itself would make a step depend on how its batch is split. With them they
    are the frozen batch norms that the weights were trained with.

    Raises:
        ConfigError: torchvision is not installed, or there are no such weights.
    """

    wrap_modules: ClassVar[tuple[str, ...]] = ("BasicBlock",)
    """Wrap units in it, for the `_fsdp_wrap_modules` of the policy."""

    def __init__(self, backbone: str, weights: str | None, dim: int, num_cameras: int) -> None:
        super().__init__()
        self._pretrained = backbone, weights
        with torch.random.fork_rng(devices=[]):  # drawn below, once, as into shards
            resnet = _resnet(backbone, weights)
        self.features = nn.Sequential(OrderedDict(_without_head(resnet)))
        for module in self.features.modules():
            if isinstance(module, nn.Conv2d):
                module.__class__ = _Conv2d
                module.reset_parameters()
        # A 1 x 1 convolution: each place of the last map becomes a token of the width D.
        self.to_token = nn.Conv2d(resnet.fc.in_features, dim, kernel_size=1)
        self.camera = nn.Parameter(torch.empty(num_cameras, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small codes of the cameras."""
        nn.init.normal_(self.camera, std=0.02)

    def load_pretrained(self) -> None:
        """Fetch the weights that were named, if any, through torch's cache of downloads.

        Raises:
            ConfigError: they cannot be fetched.
        """
        backbone, name = self._pretrained
        if name is None:
            return
        try:
            found = _weights(backbone, name).get_state_dict(progress=False, check_hash=True)
        except OSError as error:
            raise ConfigError(
                Problem(
                    "policy.vision_weights",
                    f"= {name!r} of {backbone} cannot be fetched: {error}.",
                    "Use --policy.vision_weights None, or put the file into torch's cache.",
                )
            ) from error
        # The classifier of ImageNet is not a part of this network.
        kept = {n: v for n, v in found.items() if not n.startswith("fc.")}
        self.features.load_state_dict(kept)

    def forward(self, image_B3HW: Tensor, camera: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, H * W, D] of the feature map, and their positions [H * W, D].

        A position is the sum of a code of the place and a learned one of the camera.
        """
        # [B, 3, height, width] -> [B, C, H, W] -> [B, D, H, W]
        map_BDHW = self.to_token(self.features(image_B3HW))
        dim, height, width = map_BDHW.shape[1:]
        # [H * W, D], computed at each call, since the size of the picture is known only here; and
        # on its device, since a copy from the host would make the host wait for the device.
        place_SD = place_codes(height, width, dim, map_BDHW.device).to(map_BDHW)
        # [B, D, H * W] -> [B, H * W, D]
        return map_BDHW.flatten(2).transpose(1, 2), place_SD + self.camera[camera]


def require_cameras(spec: DataSpec, names: Sequence[str]) -> None:
    """Check that the data has pictures of these names.

    Raises:
        ConfigError: a camera is missing.
    """
    missing = [name for name in names if name not in spec.cameras()]
    if missing:
        raise ConfigError(
            Problem(
                "policy.cameras",
                f"names {', '.join(map(repr, missing))}, which the dataset does not have.",
                f"It has: {', '.join(spec.cameras()) or 'no camera'}; --dataset.rename "
                f"OLD={missing[0]} gives one this name.",
            )
        )


def place_codes(height: int, width: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Sinusoids of row (first half) and column (second half): [height * width, dim]."""
    half = dim // 2
    # Sine and cosine come in pairs: of an odd half the last cosine falls away.
    rows_HD = sinusoids(height, half + half % 2, device)[:, :half]
    rest = dim - half
    columns_WD = sinusoids(width, rest + rest % 2, device)[:, :rest]
    # [H, half] -> [H, W, half]: the same in every column; below, the same in every row
    rows_HWD = rows_HD[:, None].expand(-1, width, -1)
    columns_HWD = columns_WD[None].expand(height, -1, -1)
    return torch.cat([rows_HWD, columns_HWD], dim=-1).flatten(0, 1)


class _Conv2d(nn.Conv2d):
    """One of a ResNet, which draws its own values as arXiv:1502.01852 does for ReLUs.

    Torchvision's network draws them when it is built, which leaves none to a model on meta.
    """

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


def _resnet(backbone: str, weights: str | None) -> Any:
    """The network with random weights, and with the norms that `weights` ask for."""
    torchvision = _import_torchvision()
    if weights is None:
        return torchvision.models.get_model(backbone, weights=None, norm_layer=_group_norm)
    _weights(backbone, weights)

    class FrozenNorm(torchvision.ops.FrozenBatchNorm2d):  # type: ignore[misc, name-defined]
        """Computes in fp32: its buffers are, also where the weights around it are narrow."""

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x.float())
            return result.to(x.dtype)

    return torchvision.models.get_model(backbone, weights=None, norm_layer=FrozenNorm)


def _without_head(resnet: Any) -> list[tuple[str, nn.Module]]:
    return [(n, part) for n, part in resnet.named_children() if n not in ("avgpool", "fc")]


def _weights(backbone: str, name: str) -> Any:
    """Torchvision's entry of the pretrained weights; nothing is fetched."""
    try:
        return _import_torchvision().models.get_model_weights(backbone)[name]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            Problem(
                "policy.vision_weights",
                f"= {name!r}: {backbone} does not have such weights.",
                "Use --policy.vision_weights None, or IMAGENET1K_V1.",
            )
        ) from error


def _import_torchvision() -> Any:
    try:
        import torchvision
    except ImportError as error:
        raise ConfigError(
            Problem(
                "policy.cameras",
                f": pictures are read by torchvision's ResNet, which cannot be imported ({error}).",
                'Install the extra: pip install "parallel-train[vision]".',
            )
        ) from error
    return torchvision


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(16, channels)
