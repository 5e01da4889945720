"""Small models of the families that couple samples or hold many operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv_net() -> nn.Module:
    """Three convolutions with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


class BasicBlock(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or ins != outs:
            self.short = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


def resnet20(width: int = 4) -> nn.Module:
    """He et al. for small images: 9 blocks of two convolutions."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    ins = width
    for stage in range(3):
        outs = width << stage
        for block in range(3):
            layers.append(BasicBlock(ins, outs, 2 if stage and not block else 1))
            ins = outs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, 3))


class Bottleneck(nn.Module):
    """As torchvision: 1x1, 3x3, 1x1, in-place ReLU."""

    def __init__(self, ins: int, width: int, stride: int) -> None:
        super().__init__()
        outs = 4 * width
        self.conv1 = nn.Conv2d(ins, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or ins != outs:
            self.downsample = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    """torchvision's layout (3, 4, 6, 3 bottlenecks), with few channels."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        ins = width
        for stage, blocks in enumerate((3, 4, 6, 3)):
            layers = []
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(ins, width << stage, stride))
                ins = 4 * (width << stage)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(ins, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(4):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def mlp(
    width: int = 16, *, norm: Callable[[int], nn.Module] = nn.BatchNorm1d, dropout: float = 0
) -> nn.Module:
    """Two hidden layers with a norm each, for `data.rows`."""
    layers: list[nn.Module] = []
    ins = 6
    for _ in range(2):
        layers += [nn.Linear(ins, width), norm(width), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        ins = width
    return nn.Sequential(*layers, nn.Linear(ins, 3))


def encoder(norm: str = "batch", *, outs: int = 5) -> nn.Module:
    """Convolutional encoder of small images, with BatchNorm or GroupNorm."""

    def normalise(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(2, channels)

    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        normalise(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        normalise(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, outs),
    )


def head(ins: int = 5, outs: int = 5) -> nn.Module:
    """Projection head with BatchNorm; the last BatchNorm has no weights (as in BYOL and SimSiam)."""
    return nn.Sequential(
        nn.Linear(ins, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, outs, bias=False),
        nn.BatchNorm1d(outs, affine=False),
    )


class TextEncoder(nn.Module):
    """BERT-like: token and position embeddings, LayerNorm, layers, masked mean."""

    def __init__(self, *, layers: int = 2, outs: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.positions = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.pooler = nn.Linear(8, outs)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(ids.size(1), device=ids.device).unsqueeze(0).expand_as(ids)
        h = self.norm(self.words(ids) + self.positions(positions))
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=~mask)
        weights = mask.unsqueeze(-1).to(h.dtype)
        pooled = (h * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.tanh(self.pooler(pooled))


class UNet(nn.Module):
    """Two levels, BatchNorm throughout, a skip connection by `cat`."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.down1 = self._double(3, width)
        self.down2 = self._double(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = self._double(2 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double(ins: int, outs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(ins, outs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outs, outs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        deep = self.down2(F.max_pool2d(skip, 2))
        return self.out(self.up1(torch.cat([skip, self.up(deep)], dim=1)))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm over the last dimension (channels), layer scale, drop-path per sample."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(0.1 * torch.ones(width))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        y = y.permute(0, 3, 1, 2)
        return x + drop_path(y, self.drop)


def drop_path(x: Tensor, drop: float) -> Tensor:
    """Drop whole samples at random, as timm writes it."""
    if drop == 0:
        return x
    keep = 1 - drop
    coins = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * coins.div_(keep)


def convnext(drop: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 2, stride=2),
        ConvNeXtBlock(4, drop),
        ConvNeXtBlock(4, drop),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(4),
        nn.Linear(4, 3),
    )


class Named(nn.Module):
    """Container of modules and parameters for a loss."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def __getattr__(self, name: str) -> Any:  # attributes are of any type
        return super().__getattr__(name)
