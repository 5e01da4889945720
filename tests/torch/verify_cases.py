"""Models and losses with a known verdict of `verify`: exact, or a cause in a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch.options import FrozenBatchNorm, PerSampleRandom

SAMPLES, FEATURES, CLASSES = 12, 6, 4


@dataclass(frozen=True)
class Problem:
    """Arguments of `verify`."""

    model: nn.Module
    loss_fn: Callable[[Any], Any]
    batch: Any
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Problem with the expected verdict of `verify`."""

    name: str
    make: Callable[[], Problem]
    kind: str | None = None  # None: exact
    module: str = ""
    remedy: str = ""  # substring of the remedy


def flat_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, FEATURES), torch.arange(SAMPLES) % CLASSES


def image_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 2, 7, 7), torch.arange(SAMPLES) % CLASSES


def token_batch() -> dict[str, Tensor]:
    """Return tokens with 1 to 5 labels per sample."""
    ids = torch.randint(1, 11, (SAMPLES, 6))
    labels = torch.randint(0, CLASSES, (SAMPLES, 6))
    for row in range(SAMPLES):
        labels[row, 1 + row % 5 :] = -100
    return {"ids": ids, "labels": labels}


def supervised(model: nn.Module, batch: Any = None, **options: Any) -> Problem:
    loss_fn = lambda b: F.cross_entropy(model(b[0]), b[1])  # noqa: E731
    return Problem(model, loss_fn, flat_batch() if batch is None else batch, options)


def embedding(model: nn.Module, loss: Callable[..., Tensor], **options: Any) -> Problem:
    """Return a problem with two views of each sample."""
    batch = (torch.randn(SAMPLES, FEATURES), torch.randn(SAMPLES, FEATURES))
    return Problem(model, lambda b: loss(model(b[0]), model(b[1])), batch, options)


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), *between, nn.ReLU(), nn.Linear(8, CLASSES))


def conv(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), *between, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(100, CLASSES)
    )


class Transformer(nn.Module):
    """One block over (samples, 6 tokens), sequence first inside, as older models are."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids).transpose(0, 1)).transpose(0, 1))


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def language(loss: Callable[[Tensor, Tensor], Tensor] = token_mean, **options: Any) -> Problem:
    model = Transformer()
    return Problem(model, lambda b: loss(model(b["ids"]), b["labels"]), token_batch(), options)


class BatchRenorm(nn.Module):
    """Batch renormalization (arXiv:1702.03275): values of running statistics, gradients of the batch."""

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(0), x.std(0, correction=0) + 1e-3
        r, d = (std / self.std).detach(), ((mean - self.mean) / self.std).detach()
        return (x - mean) / std * r + d


class HandNorm(nn.Module):
    """Batch statistics in a module's own forward, between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.tanh(h - h.mean(0)))


class Capacity(nn.Module):
    """Router whose experts take samples in the order of the batch until they are full."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(2)])
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        probability = self.router(x).softmax(-1)
        choice = probability.argmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for index, expert in enumerate(self.experts):
            mine = (choice == index).nonzero()[:, 0][: self.capacity]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * probability[mine, index, None])
        return out


class DropPath(nn.Module):
    def __init__(self, *, per_batch: bool) -> None:
        super().__init__()
        self.body, self.per_batch = nn.Linear(8, 8), per_batch

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(1 if self.per_batch else len(x), dtype=x.dtype) < 0.5
        return x + self.body(x) * keep[:, None] / 0.5


class Branch(nn.Module):
    """Control flow on a statistic of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(x) if x.abs().max() > 1.2 else x


class Counting(nn.Module):
    """Module whose forward updates and uses a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.5 * self.calls)


def frozen_batchnorm() -> nn.Module:
    model = conv(nn.BatchNorm2d(4))
    model[1].eval().requires_grad_(requires_grad=False)
    return model


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.2
    return F.cross_entropy(logits, torch.arange(len(a)))


def triplet(a: Tensor, b: Tensor) -> Tensor:
    """Triplet loss with the hardest negative of the batch."""
    distance = torch.cdist(a, b) + 1e3 * torch.eye(len(a), dtype=a.dtype)
    return F.relu((a - b).norm(dim=1) - distance.amin(1) + 5.0).mean()


def barlow(a: Tensor, b: Tensor) -> Tensor:
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    return (a.T @ b / len(a) - torch.eye(a.shape[1], dtype=a.dtype)).square().sum()


def per_sample_pairs(a: Tensor, b: Tensor) -> Tensor:
    return (F.cosine_similarity(a, b) - 1).square().mean()


def num_items(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum divided by a constant count, as in Hugging Face models with num_items_in_batch."""
    total = 33  # of the whole batch, a constant
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total


def with_loss(loss: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Problem:
    model = mlp()
    return Problem(model, lambda b: loss(model(b[0]), b[1]), flat_batch(), options)


def sample_weighted(**options: Any) -> Problem:
    model = mlp()
    x, y = flat_batch()

    def loss_fn(b: Any) -> Tensor:
        losses = F.cross_entropy(model(b["x"]), b["y"], reduction="none")
        return (losses * b["w"]).sum() / b["w"].sum()

    return Problem(model, loss_fn, {"x": x, "y": y, "w": torch.rand(SAMPLES) + 0.1}, options)


def class_weighted(**options: Any) -> Problem:
    model, weight = mlp(), torch.tensor([1.0, 2.0, 3.0, 0.5])
    criterion = nn.CrossEntropyLoss(weight=weight)

    def loss_fn(b: Any) -> Tensor:
        logits = model(b[0])
        criterion.to(logits.dtype)
        return criterion(logits, b[1])

    x, y = flat_batch()
    return Problem(model, loss_fn, (x, y.sort().values), options)


def balanced(model: nn.Module) -> Problem:
    """Return a problem with a separable loss plus a balance loss over the batch."""
    gate = nn.Linear(FEATURES, 2)

    def loss_fn(b: Any) -> Tensor:
        share = gate(b[0]).softmax(-1).mean(0)
        return F.cross_entropy(model(b[0]), b[1]) + share.square().sum()

    return Problem(nn.ModuleList([model, gate]), loss_fn, flat_batch(), {})


def lstm() -> Problem:
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 5), "head": nn.Linear(5, CLASSES)})
    batch = (torch.randn(SAMPLES, 7, 3), torch.arange(SAMPLES) % CLASSES)
    loss_fn = lambda b: F.cross_entropy(model["head"](model["lstm"](b[0].transpose(0, 1))[0][-1]), b[1])  # noqa: E731
    return Problem(model, loss_fn, batch, {})


def wide_rows(model: nn.Module) -> Problem:
    """Return a problem with three crops per sample, flattened to (samples * 3, features)."""
    batch = (torch.randn(SAMPLES, 3, FEATURES), torch.arange(SAMPLES) % CLASSES)
    loss_fn = lambda b: F.cross_entropy(model(b[0].flatten(0, 1)).unflatten(0, (-1, 3)).mean(1), b[1])  # noqa: E731
    return Problem(model, loss_fn, batch, {})


def mixup() -> Problem:
    model = mlp()
    loss_fn = lambda b: F.cross_entropy(model(0.7 * b[0] + 0.3 * b[0].roll(1, 0)), b[1])  # noqa: E731
    return Problem(model, loss_fn, flat_batch(), {})


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    model[2].weight = model[0].weight
    return model


def spectral(norm: Any) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


EXACT = [
    Case("mlp", lambda: supervised(mlp())),
    Case("tied weights", lambda: supervised(tied())),
    Case("conv net", lambda: supervised(conv(), image_batch())),
    Case("group norm", lambda: supervised(conv(nn.GroupNorm(2, 4)), image_batch())),
    Case("layer norm", lambda: supervised(mlp(nn.LayerNorm(8)))),
    Case("instance norm", lambda: supervised(conv(nn.InstanceNorm2d(4)), image_batch())),
    Case("batchnorm eval", lambda: supervised(conv(nn.BatchNorm2d(4)).eval(), image_batch())),
    Case("batchnorm frozen", lambda: supervised(frozen_batchnorm(), image_batch())),
    Case(
        "batchnorm frozen by the accumulator",
        lambda: supervised(conv(nn.BatchNorm2d(4)), image_batch(), participants=[FrozenBatchNorm()]),
    ),
    Case("lstm, 7 time steps first", lstm),
    Case("crops flattened into the batch", lambda: wide_rows(mlp(nn.LayerNorm(8)))),
    Case("experts without capacity", lambda: supervised(Capacity(None))),
    Case("pairs within a sample", lambda: embedding(mlp(), per_sample_pairs)),
    Case("sum", lambda: with_loss(lambda p, y: F.cross_entropy(p, y, reduction="sum"), reduction="sum")),
    Case("sample weights", lambda: sample_weighted(weight=lambda b: float(b["w"].double().sum()))),
    Case("tokens", lambda: language(weight=lambda b: int((b["labels"] != -100).sum()))),
    Case(
        "dropout, a stream per sample",
        lambda: supervised(mlp(nn.Dropout(0.3)), participants=[PerSampleRandom()]),
    ),
    Case(
        "drop-path per sample, a stream per sample",
        lambda: supervised(mlp(DropPath(per_batch=False)), participants=[PerSampleRandom()]),
    ),
    Case("spectral norm eval", lambda: supervised(spectral(nn.utils.parametrizations.spectral_norm).eval())),
]

NOT_EXACT = [
    Case(
        "batchnorm",
        lambda: supervised(conv(nn.BatchNorm2d(4)), image_batch()),
        "batchnorm",
        "1",
        "FrozenBatchNorm",
    ),
    Case("batchnorm 1d", lambda: supervised(mlp(nn.BatchNorm1d(8))), "batchnorm", "1", "GroupNorm"),
    Case(
        "batchnorm without running statistics",
        lambda: supervised(mlp(nn.BatchNorm1d(8, track_running_stats=False)).eval()),
        "batchnorm",
        "1",
    ),
    Case("batchnorm over crops", lambda: wide_rows(mlp(nn.BatchNorm1d(8))), "batchnorm", "1"),
    Case("batch renorm", lambda: supervised(mlp(BatchRenorm(8))), "coupled", "1", "whole batch"),
    Case("hand-written statistics", lambda: supervised(HandNorm()), "coupled", ""),
    Case("experts with capacity", lambda: supervised(Capacity(3)), "coupled", ""),
    Case("control flow", lambda: supervised(mlp(Branch())), "coupled", "1"),
    Case("mix-up of the batch", mixup, "coupled", "loss_fn"),
    Case("InfoNCE", lambda: embedding(mlp(), info_nce), "coupled_loss", "loss_fn", "whole batch"),
    Case("hardest triplet", lambda: embedding(mlp(), triplet), "coupled_loss", "loss_fn"),
    Case("Barlow twins", lambda: embedding(mlp(), barlow), "coupled_loss", "loss_fn"),
    Case("batchnorm and InfoNCE", lambda: embedding(mlp(nn.BatchNorm1d(8)), info_nce), "batchnorm", "1"),
    Case("balance loss", lambda: balanced(mlp()), "coupled_loss", "loss_fn"),
    Case("token mean", lambda: language(), "weight", "loss_fn", 'weight=count_tokens("labels")'),
    Case(
        "token mean declared a sum",
        lambda: language(reduction="sum"),
        "weight",
        "loss_fn",
        'reduction="mean", weight=count_tokens("labels")',
    ),
    Case("sample weights not declared", sample_weighted, "weight", "loss_fn", 'weight=sample_weights("w")'),
    Case("class weights", class_weighted, "weight", "loss_fn", 'weight=class_weights(weight, "1")'),
    Case(
        "sum declared a mean",
        lambda: with_loss(lambda p, y: F.cross_entropy(p, y, reduction="sum")),
        "sum",
        "loss_fn",
        'reduction="sum"',
    ),
    Case("num_items_in_batch", lambda: language(num_items), "sum", "loss_fn", "num_items_in_batch"),
    Case(
        "mean declared a sum",
        lambda: with_loss(F.cross_entropy, reduction="sum"),
        "mean",
        "loss_fn",
        'reduction="mean"',
    ),
    Case(
        "batch size in the loss",
        lambda: with_loss(lambda p, y: F.cross_entropy(p, y, reduction="sum") / len(y) ** 0.5),
        "batch_size",
        "loss_fn",
        "mean over the micro-batch",
    ),
    Case("dropout", lambda: supervised(mlp(nn.Dropout(0.3))), "random", "1", "PerSampleRandom"),
    Case("drop-path per sample", lambda: supervised(mlp(DropPath(per_batch=False))), "random", "1"),
    Case("drop-path per batch", lambda: supervised(mlp(DropPath(per_batch=True))), "random", "1"),
    Case(
        "spectral norm",
        lambda: supervised(spectral(nn.utils.parametrizations.spectral_norm)),
        "state",
        "0.parametrizations.weight.0",
        "evaluation mode",
    ),
    Case("spectral norm, old form", lambda: supervised(spectral(nn.utils.spectral_norm)), "state", "0"),
    Case("a counter in the forward", lambda: supervised(mlp(Counting())), "state", "1"),
]
