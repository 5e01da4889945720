"""Lightning's Trainer with a small transformer, for next tokens or classes of sequences."""

import tempfile
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule
from peers.lightning_trainer import make_trainer
from peers.work import TrainerWindow

from superbatch.integrations.lightning import ExactAccumulation
from superbatch.torch import count_tokens

from . import STEPS, network


class Module(LightningModule):
    """The network with its loss, optimizer and a logged value."""

    def __init__(self, training: str) -> None:
        super().__init__()
        self.net = network.Network(training)

    def training_step(self, batch: network.Batch, batch_idx: int) -> torch.Tensor:
        loss = network.loss_of(self.net, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return network.optimizer_of(self.net)


class Exact(ExactAccumulation, Module):
    """The same module with exact accumulation."""

    weight_of = staticmethod(count_tokens("labels"))


def window(training: str, exact: bool) -> TrainerWindow:
    """Return an endless `Trainer.fit`."""
    module = (Exact if exact else Module)(training)
    if isinstance(module, Exact):
        module.coupled = training == "coupled"

    def fit(loader: Any) -> None:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            make_trainer(accumulation_steps=STEPS, folder=folder, max_grad_norm=1.0).fit(module, loader)

    return TrainerWindow(fit, network.microbatches(training))
