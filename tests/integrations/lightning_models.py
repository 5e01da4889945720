"""Small Lightning modules over samples of unequal token counts, and their training."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from superbatch.integrations.lightning import ExactAccumulation

MARKS = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Lightning was unable to|.*litlogger|.*isinstance.treespec"),
]
SAMPLES, WORDS, LENGTH = 44, 11, 7  # three batches of 16, the last with 12
TAIL = 12


class Tokens(lightning.LightningModule):
    """Module with a mean over tokens in float64; `seen` records its hooks."""

    lr, optimizer = 0.5, torch.optim.SGD
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(WORDS, 6), nn.Tanh(), nn.Linear(6, WORDS)).double()
        self.norms: list[float] = []
        self.outputs: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x).flatten(0, 1), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=self.lr, **self.options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def count(batch: Any) -> int:
    """Return the number of tokens of a batch."""
    return int((batch[1] != -100).sum())


class ByTokens(ExactAccumulation):
    """Mixin of a user that counts tokens, placed before the module."""

    def weight_of(self, batch: Any) -> int:
        return count(batch)


class Exact(ByTokens, Tokens):
    """Tokens with exact accumulation."""


class Unchecked(ExactAccumulation):
    """Mixin without a check, so that `training_step` runs only for micro-batches."""

    def gradient_options(self) -> dict[str, Any]:
        return {"check": False}


class Halved(Tokens):
    """Module that halves its gradient in a hook and triples its loss in its own backward."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        (3 * loss).backward(**kwargs)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


class ExactHalved(ByTokens, Halved):
    """Halved with exact accumulation."""


class Rows(Logger):
    """Logger that stores the logged values."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """No-op."""


def samples(ignored: slice | None = None) -> tuple[Tensor, Tensor]:
    """Return sequences of 1 to 7 tokens; the first are short, and those in `ignored` have no label."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    y = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator)
    lengths[:4] = 1
    y[torch.arange(LENGTH)[None] >= lengths[:, None]] = -100
    if ignored is not None:
        y[ignored] = -100
    return x, y


def loader(size: int, rank: int | None = None, ignored: slice | None = None) -> DataLoader[Any]:
    """Return a loader of the samples, or of every second sample for one of two ranks."""
    given = TensorDataset(*samples(ignored))
    sampler = None if rank is None else DistributedSampler(given, 2, rank, shuffle=False)
    return DataLoader(given, batch_size=size, sampler=sampler)


def train(module: lightning.LightningModule, size: int, batches: int, **options: Any) -> lightning.Trainer:
    """Train on all samples, and return the Trainer.

    Args:
        module: module, trained in place.
        size: size of the loader's batches.
        batches: number of batches in one update.
        options: options of the Trainer, or `ckpt_path`, `rank` (of two), or `ignored` samples.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    start, rank = options.pop("ckpt_path", None), options.pop("rank", None)
    ignored = options.pop("ignored", None)
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": Rows(),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accumulate_grad_batches=batches, **{**defaults, **options})
    trainer.fit(module, loader(size, rank, ignored), loader(SAMPLES, rank), ckpt_path=start)
    return trainer


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """Return the largest difference of two modules' parameters."""
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for (_, p), (_, q) in pairs)
