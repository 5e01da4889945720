"""Lightning's `Tuner.scale_batch_size` (its BatchSizeFinder), with its default settings.

https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#batch-size-finder
"""

import logging
import tempfile
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.memory import is_oom_error
from memory_work import samples_of
from torch.utils.data import DataLoader

from .finders import UPDATES, Found, Stopwatch, Watch
from .task import Batch
from .work import Work


class Module(LightningModule):
    """The work as a LightningModule whose loader has the size under test."""

    def __init__(self, work: Work, watch: Watch) -> None:
        super().__init__()
        self.work, self.watch, self.batch_size = work, watch, 2
        self.net, self.made_optimizer = work.build()
        watch.see(self.net)

    def train_dataloader(self) -> Any:
        return DataLoader(samples_of(self.work), batch_size=self.batch_size)

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        return self.watch.loss(self.net(batch["inputs"]), batch)

    def configure_optimizers(self) -> Any:
        return self.made_optimizer


def find(work: Work, watch: Watch, variant: str | None) -> Found:
    """Search, then train with the found size."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, clock = Module(work, watch), Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=UPDATES,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        assert variant is not None
        Tuner(trainer).scale_batch_size(module, mode=variant)
        lost, chosen = clock.seconds(), module.batch_size
        try:
            trainer.fit(module)
        except RuntimeError as error:
            if not is_oom_error(error):
                raise
            return Found(chosen, trains=False, kept=0, seconds=lost, note="training runs out of memory")
    return Found(chosen, trains=True, kept=UPDATES * chosen, seconds=lost)
