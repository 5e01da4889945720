"""Four trainings with samples coupled by BatchNorm, by the loss, or by both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CLASSES = 10
VOCABULARY, LENGTH = 1000, 32
Data = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """Training with coupled samples.

    Attributes:
        name: name on the command line.
        title: description in tables.
        model: function that makes the model.
        data: function that makes a batch of a number of samples.
        encode: function from model and (micro-)batch to the input of the loss.
        loss: function from model and that input to the loss.
        embeds: True if the loss depends on embeddings only, so that gradients can be cached.
        normalises: True if the model has BatchNorm.
        least: smallest micro-batch of a plain forward: BatchNorm1d raises for one sample.
        seed: seed of model and batch.
    """

    name: str
    title: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Data]
    encode: Callable[[Any, Data], Any]
    loss: Callable[[Any, Any], Tensor]
    embeds: bool
    normalises: bool
    least: int = 1
    seed: int = 0

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Make the model, with the same parameters each time."""
        torch.manual_seed(self.seed)
        return self.model().to(dtype).train()

    def batch(self, samples: int, dtype: torch.dtype = torch.float32) -> Data:
        """Make the batch, with the same numbers each time."""
        torch.manual_seed(self.seed + 1)
        made = self.data(samples)
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in made.items()}


class Blocks(nn.Module):
    """A chain of blocks, each under `torch.utils.checkpoint` on request."""

    checkpointed = False

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        self.short: nn.Module = nn.Identity()
        if ins != outs:
            self.short = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


def convolution(ins: int, outs: int, *more: nn.Module, stride: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    conv = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outs), nn.ReLU(), *more)


def pooled(width: int, outs: int) -> nn.Sequential:
    """Average over the image, then a linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outs))


def resnet20() -> nn.Module:
    """ResNet-20 of He et al. for 32 x 32 images: 16, 32 and 64 channels, 21 BatchNorms."""
    blocks: list[nn.Module] = [convolution(3, 16)]
    ins = 16
    for outs in (16, 32, 64):
        for number in range(3):
            blocks.append(Residual(ins, outs, 2 if outs != 16 and number == 0 else 1))
            ins = outs
    return Blocks(*blocks, pooled(64, CLASSES))


def convnet() -> nn.Module:
    """Three convolutions with BatchNorm."""
    return Blocks(
        convolution(3, 16, nn.MaxPool2d(2)),
        convolution(16, 32, nn.MaxPool2d(2)),
        convolution(32, 64),
        pooled(64, CLASSES),
    )


def projected() -> nn.Module:
    """A convolutional encoder with BatchNorm and a head with BatchNorm, as in SimCLR and BYOL."""
    head = nn.Sequential(
        nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32, bias=False)
    )
    return Blocks(
        convolution(3, 16),
        convolution(16, 32, stride=2),
        convolution(32, 32),
        convolution(32, 64, stride=2),
        pooled(64, 64),
        nn.Sequential(head, nn.BatchNorm1d(32, affine=False)),
    )


class TextTower(nn.Module):
    """Two transformer layers and a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 64)
        self.layers = Blocks(
            *(
                nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
                for _ in range(2)
            )
        )
        self.out = nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.layers(self.words(ids)).mean(1))


class Towers(nn.Module):
    """Image tower with GroupNorm, text tower with LayerNorm, and a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()

        def grouped(ins: int, outs: int, stride: int) -> nn.Sequential:
            conv = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
            return nn.Sequential(conv, nn.GroupNorm(4, outs), nn.ReLU())

        self.image = Blocks(grouped(3, 16, 2), grouped(16, 32, 2), grouped(32, 64, 1), pooled(64, 64))
        self.text = TextTower()
        self.scale = nn.Parameter(torch.tensor(2.0))


def _images(samples: int) -> Data:
    return {"image": torch.randn(samples, 3, 32, 32), "label": torch.randint(CLASSES, (samples,))}


def _views(samples: int) -> Data:
    view = torch.randn(samples, 3, 32, 32)
    return {"first": view, "second": view + 0.3 * torch.randn_like(view)}


def _pairs(samples: int) -> Data:
    return {
        "image": torch.randn(samples, 3, 32, 32),
        "text": torch.randint(VOCABULARY, (samples, LENGTH)),
    }


def _classified(model: nn.Module, batch: Data) -> tuple[Tensor, Tensor]:
    return model(batch["image"]), batch["label"]


def _cross_entropy(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(*outputs)


def _info_nce(embeddings: Sequence[Tensor], scale: Any) -> Tensor:
    first, second = (F.normalize(z, dim=1) for z in embeddings)
    logits = scale * first @ second.T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _classifier(name: str, title: str, model: Callable[[], nn.Module]) -> Work:
    return Work(
        name=name,
        title=f"{title}, cross entropy",
        model=model,
        data=_images,
        encode=_classified,
        loss=_cross_entropy,
        embeds=False,
        normalises=True,
    )


def works() -> dict[str, Work]:
    """Return the trainings by name."""
    views = Work(
        name="views",
        title="encoder and head with BatchNorm, InfoNCE of two views",
        model=projected,
        data=_views,
        encode=lambda model, batch: (model(batch["first"]), model(batch["second"])),
        loss=lambda model, z: _info_nce(z, 10.0),
        embeds=True,
        normalises=True,
        least=2,
    )
    towers = Work(
        name="towers",
        title="image and text tower without BatchNorm, InfoNCE",
        model=Towers,
        data=_pairs,
        encode=lambda model, batch: (model.image(batch["image"]), model.text(batch["text"])),
        loss=lambda model, z: _info_nce(z, model.scale.exp()),
        embeds=True,
        normalises=False,
    )
    made = (
        _classifier("resnet20", "ResNet-20", resnet20),
        _classifier("convnet", "three convolutions with BatchNorm", convnet),
        views,
        towers,
    )
    return {work.name: work for work in made}
