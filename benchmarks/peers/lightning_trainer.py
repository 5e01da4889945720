"""Lightning's Trainer with ``accumulate_grad_batches``."""

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from .task import Batch, Parameters, Task, parameters_of
from .work import TrainerWindow, Work, loss_of

REMARKS = {
    "resume in a window": "with a loader that has a state_dict, as Lightning requires",
    "one NaN micro-batch": "dropped by returning None, as documented; the divisor stays K",
}


class Module(LightningModule):
    """The task as a LightningModule."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.net, self.made_optimizer, self.made_scheduler = task.build()

    def training_step(self, batch: Batch, index: int) -> torch.Tensor | None:
        loss = self.task.loss(self.net(batch["inputs"]), batch)
        # Documented: return None to leave a micro-batch out.
        return None if self.task.skip_nonfinite and not torch.isfinite(loss) else loss

    def configure_optimizers(self) -> Any:
        if self.made_scheduler is None:
            return self.made_optimizer
        scheduler = {"scheduler": self.made_scheduler, "interval": "step"}
        return {"optimizer": self.made_optimizer, "lr_scheduler": scheduler}


class Resumable:
    """Loader with the `state_dict` that Lightning calls, so that only the window itself can be lost."""

    def __init__(self, task: Task) -> None:
        self.loader, self.served, self.skip = task.loader(), 0, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        skip, self.skip, self.served = self.skip, 0, 0
        for batch in self.loader:
            self.served += 1
            if self.served > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["served"]


class Killed(Exception):
    """Raised to end a run inside a window."""


class SaveAndDie(Callback):
    """Callback that calls `Trainer.save_checkpoint` after some micro-batches, then ends the run."""

    def __init__(self, after: int, path: Path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index + 1 == self.after:
            trainer.save_checkpoint(self.path)
            raise Killed


def make_trainer(
    *,
    accumulation_steps: int,
    folder: str,
    epochs: int = 1,
    max_grad_norm: float | None = None,
    callbacks: list[Callback] | None = None,
) -> Trainer:
    """Return a Trainer that only trains: no logger, checkpoint, progress bar or validation."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=lightning.__name__)
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=accumulation_steps,
        gradient_clip_val=max_grad_norm,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def trainer_for(task: Task, folder: str, callbacks: list[Callback] | None = None) -> Trainer:
    """Return the Trainer of a task."""
    return make_trainer(
        accumulation_steps=task.accumulation_steps,
        folder=folder,
        epochs=task.epochs,
        max_grad_norm=task.max_grad_norm,
        callbacks=callbacks,
    )


def train(task: Task, variant: str | None = None) -> Parameters:
    """Train by `Trainer.fit`."""
    module = Module(task)
    with tempfile.TemporaryDirectory() as folder:
        trainer_for(task, folder).fit(module, task.loader())
    return parameters_of(module.net)


def resume(task: Task, variant: str | None = None) -> Parameters:
    """Resume with ``ckpt_path`` from a checkpoint inside a window."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "window.ckpt"
        with contextlib.suppress(Killed):
            trainer_for(task, folder, [SaveAndDie(task.stop_after, path)]).fit(Module(task), Resumable(task))
        module = Module(task)
        trainer_for(task, folder).fit(module, Resumable(task), ckpt_path=path, weights_only=False)
    return parameters_of(module.net)


def leave(task: Task, variant: str | None = None) -> Parameters:
    """Return -1 from `on_train_batch_start`, as documented to skip the rest of an epoch."""

    class Leaves(Module):
        def on_train_batch_start(self, batch: Batch, index: int) -> int | None:
            return -1 if self.trainer.current_epoch == 0 and index == task.stop_after else None

    module = Leaves(task)
    with tempfile.TemporaryDirectory() as folder:
        trainer_for(task, folder).fit(module, task.loader())
    return parameters_of(module.net)


class _TimedModule(LightningModule):
    """The work as a LightningModule."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.net, self.made_optimizer = work.build()

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        return loss_of(self.net(batch["inputs"]), batch)

    def configure_optimizers(self) -> Any:
        return self.made_optimizer


def window(work: Work, variant: str | None = None) -> TrainerWindow:
    """Return an endless `Trainer.fit`."""
    microbatches = work.microbatches()
    module = _TimedModule(work)

    def fit(loader: Any) -> None:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            make_trainer(accumulation_steps=len(microbatches), folder=folder).fit(module, loader)

    return TrainerWindow(fit, microbatches)
