"""A ResNet that turns pictures into tokens (the `vision` extra).

Shape suffixes: B batch, C channels, H height, W width (both of the feature map), D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel_config import ConfigError, Problem
from parallel_train.data.spec import DataSpec
from parallel_train.policies.transformer import sinusoids


class ImageTokens(nn.Module):
    """Tokens of a camera's picture: the last feature map of a ResNet, place by place.

    All cameras share the network.

    Without pretrained weights the norms are group norms: batch statistics of a small micro-batch
    on every rank for itself would make a step depend on how its batch is split. With them they
    are the frozen batch norms that the weights were trained with.

    Raises:
        ConfigError: torchvision is not installed, or there are no such weights.
    """

    def __init__(self, backbone: str, weights: str | None, dim: int, num_cameras: int) -> None:
        super().__init__()
        resnet = _resnet(backbone, weights)
        self.features = nn.Sequential(
            *(part for name, part in resnet.named_children() if name not in ("avgpool", "fc"))
        )
        self.to_token = nn.Conv2d(resnet.fc.in_features, dim, kernel_size=1)
        self.camera = nn.Parameter(torch.randn(num_cameras, dim) * 0.02)

    def forward(self, image_B3HW: Tensor, camera: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, H * W, D] of the feature map, and their positions [H * W, D].

        A position is the sum of a code of the place and a learned one of the camera.
        """
        map_BDHW = self.to_token(self.features(image_B3HW))
        dim, height, width = map_BDHW.shape[1:]
        place_SD = place_codes(height, width, dim).to(map_BDHW)
        return map_BDHW.flatten(2).transpose(1, 2), place_SD + self.camera[camera]


def require_cameras(spec: DataSpec, names: Sequence[str]) -> None:
    """Check that the data has pictures of these names.

    Raises:
        ConfigError: it has not.
    """
    missing = [name for name in names if name not in spec.cameras()]
    if missing:
        raise ConfigError(
            Problem(
                "policy.cameras",
                f"names {', '.join(map(repr, missing))}, which the dataset does not have.",
                f"It has: {', '.join(spec.cameras()) or 'no camera'}.",
            )
        )


def place_codes(height: int, width: int, dim: int) -> Tensor:
    """Sinusoids of row (first half) and column (second half): [height * width, dim]."""
    half = dim // 2
    rows_HD, columns_WD = sinusoids(height, half), sinusoids(width, dim - half)
    rows_HWD = rows_HD[:, None].expand(-1, width, -1)
    columns_HWD = columns_WD[None].expand(height, -1, -1)
    return torch.cat([rows_HWD, columns_HWD], dim=-1).flatten(0, 1)


def _resnet(backbone: str, weights: str | None) -> Any:
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
    frozen = torchvision.ops.FrozenBatchNorm2d
    norm = _group_norm if weights is None else frozen
    try:
        return torchvision.models.get_model(backbone, weights=weights, norm_layer=norm)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            Problem(
                "policy.vision_weights",
                f"= {weights!r} of {backbone}: {error}.",
                "Use --policy.vision_weights None, or IMAGENET1K_V1.",
            )
        ) from error


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(16, channels)
