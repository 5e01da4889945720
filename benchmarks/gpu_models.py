"""Trainings of `benchmarks/gpu.py` in plain torch, at full size and at a size for a dry run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Data = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """Model with its loss and data.

    Attributes:
        name: name on the command line and in tables.
        model: function that makes the model.
        data: function that makes a batch of a number of samples on the host.
        loss: function of model and (micro-)batch.
        sizes: micro-batch sizes to measure.
        samples: number of samples of a batch.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Data]
    loss: Callable[[Any, Data], Tensor]
    sizes: tuple[int, ...]
    samples: int


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, ins: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        outs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(ins, width, 1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outs, 1, bias=False),
            norm(outs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or ins != outs:
            self.shortcut = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), norm(outs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(depths: tuple[int, ...], width: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """ResNet-50 with depths (3, 4, 6, 3) and width 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        norm(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    ins = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(ins, width << stage, 2 if stage and not block else 1, norm))
            ins = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, 1000))


class Block(nn.Module):
    """Transformer block with causal attention and a dense or mixture-of-experts feed-forward layer."""

    def __init__(self, width: int, heads: int, *, causal: bool = True, experts: int = 0) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        hidden = 4 * width
        self.router = nn.Linear(width, experts, bias=False) if experts else None
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(max(1, experts))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(-3, -2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        h = self.norm2(x)
        if self.router is None:
            return x + self.parts[0](h), None
        shares = self.router(h).float().softmax(-1).to(h.dtype)
        top, chosen = shares.topk(2, -1)
        mixed = torch.zeros_like(h)
        for index, expert in enumerate(self.parts):  # dense dispatch: every expert gets every token
            gate = (top * (chosen == index)).sum(-1, keepdim=True)
            mixed = mixed + gate * expert(h)
        counts = F.one_hot(chosen, len(self.parts)).to(h.dtype).flatten(0, -3).mean((0, 1))
        balance = (counts * shares.flatten(0, -2).mean(0)).sum() * len(self.parts)
        return x + mixed, balance


class Language(nn.Module):
    """GPT-2-like language model; with experts a Mixtral-like model, whose balance loss couples the batch."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, experts: int = 0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64), experts=experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            if balance is not None:
                balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean() if balances else None


class Towers(nn.Module):
    """CLIP-like image and text towers with a learnt temperature."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.patches, self.tokens = nn.Conv2d(3, width, 16, 16), nn.Embedding(vocabulary, width)
        self.image = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.text = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.scale = nn.Parameter(torch.tensor(2.66))

    @staticmethod
    def _run(x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for block in blocks:
            x, _ = block(x)
        return F.normalize(x.mean(1), dim=-1)

    def forward(self, batch: Data) -> tuple[Tensor, Tensor]:
        image = self._run(self.patches(batch["image"]).flatten(2).transpose(1, 2), self.image)
        return image, self._run(self.tokens(batch["text"]), self.text)


def contrast(model: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
    """CLIP's loss of the embeddings of two towers."""
    image, text = pair
    logits = model.scale.exp() * image @ text.T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def images(size: int) -> Callable[[int], Data]:
    return lambda count: {"x": torch.randn(count, 3, size, size), "y": torch.randint(1000, (count,))}


def text(vocabulary: int, length: int) -> Callable[[int], Data]:
    def make(count: int) -> Data:
        ids = torch.randint(vocabulary, (count, length + 1))
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    return make


def class_loss(model: Any, batch: Data) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def language_loss(model: Any, batch: Data) -> Tensor:
    logits, balance = model(batch["ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return loss if balance is None else loss + 0.02 * balance


def separable(*, small: bool) -> list[Training]:
    """Return the trainings whose loss is a mean over samples."""
    sizes = (1, 4) if small else (1, 4, 16, 64)
    samples, width = (8, 32) if small else (128, 2048)

    def mlp() -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1000)
        )

    def vectors(count: int) -> Data:
        return {"x": torch.randn(count, width), "y": torch.randint(1000, (count,))}

    def group_norm(channels: int) -> nn.Module:
        return nn.GroupNorm(min(32, channels), channels)

    depths, channels, pixels = ((1, 1), 8, 32) if small else ((3, 4, 6, 3), 64, 224)
    vocabulary, length, features, layers = (97, 16, 32, 1) if small else (50257, 1024, 768, 12)
    return [
        Training("mlp", mlp, vectors, class_loss, sizes, samples),
        Training(
            "resnet50",
            lambda: resnet(depths, channels, group_norm),
            images(pixels),
            class_loss,
            sizes,
            samples,
        ),
        Training(
            "gpt2-small",
            lambda: Language(vocabulary, length, features, layers),
            text(vocabulary, length),
            language_loss,
            sizes,
            samples // 2,
        ),
    ]


def coupled(*, small: bool) -> list[Training]:
    """Return the trainings with coupled samples."""
    depths, channels, pixels = ((1, 1), 8, 32) if small else ((3, 4, 6, 3), 64, 224)
    width, layers = (32, 1) if small else (512, 6)
    vocabulary, length = (97, 8) if small else (8192, 256)

    def pairs(count: int) -> Data:
        size = 32 if small else 128
        return {"image": torch.randn(count, 3, size, size), "text": torch.randint(vocabulary, (count, 32))}

    return [
        Training(
            "resnet50-batchnorm",
            lambda: resnet(depths, channels, nn.BatchNorm2d),
            images(pixels),
            class_loss,
            (4 if small else 16,),
            12 if small else 256,
        ),
        Training(
            "clip-towers",
            lambda: Towers(width, layers, vocabulary),
            pairs,
            lambda model, batch: contrast(model, model(batch)),
            (4 if small else 64,),
            12 if small else 4096,
        ),
        Training(
            "mixtral-like",
            lambda: Language(vocabulary, length, width, 2 if small else 4, experts=4),
            text(vocabulary, length),
            language_loss,
            (4 if small else 8,),
            12 if small else 64,
        ),
    ]
