"""Hugging Face's Trainer: a module that returns its mean loss, and `compute_loss_func`."""

import contextlib
import os
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from .task import NotApplicable, Parameters, Task, parameters_of
from .work import TrainerWindow, Work, loss_of

REMARKS = {"resume in a window": "it saves at updates only, so it replays the window"}


class Module(nn.Module):
    """Module that returns its own loss, unless the Trainer passes the labels to a loss function."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.net, self.made_optimizer, self.made_scheduler = task.build()

    def forward(
        self, inputs: Any, labels: Tensor | None = None, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.net(inputs)
        if labels is None:
            return {"logits": logits}
        return {"loss": self.task.loss(logits, {"labels": labels, "weights": weights}), "logits": logits}


def arguments_for(*, folder: str, accumulation_steps: int, **changes: Any) -> TrainingArguments:
    """Return arguments of a Trainer that only trains, without shuffling."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    common: dict[str, Any] = {
        "use_cpu": not torch.cuda.is_available(),
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(
        output_dir=folder, gradient_accumulation_steps=accumulation_steps, **{**common, **changes}
    )


def make_trainer(
    task: Task,
    folder: str,
    variant: str | None = None,
    callback: TrainerCallback | None = None,
    save: bool = False,
) -> tuple[Trainer, Module]:
    """Return a Trainer that only trains, and saves at updates on request."""
    module = Module(task)
    arguments = arguments_for(
        folder=folder,
        accumulation_steps=task.accumulation_steps,
        num_train_epochs=task.epochs,
        per_device_train_batch_size=task.microbatch_size,
        max_grad_norm=task.max_grad_norm or 0.0,
        save_strategy="steps" if save else "no",
        save_steps=1,
    )

    def mean_over_window(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        loss = task.loss_sum(outputs["logits"], {"labels": labels})
        return loss if task.reduction == "sum" else loss / num_items_in_batch

    trainer = Trainer(
        model=module,
        args=arguments,
        train_dataset=task.samples,  # type: ignore[arg-type]  # a list is a dataset
        data_collator=torch.utils.data.default_collate,
        optimizers=(module.made_optimizer, module.made_scheduler),  # type: ignore[arg-type]  # None: its constant one
        callbacks=[callback] if callback else None,
        compute_loss_func=mean_over_window if variant == "items" else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, module


def _check(task: Task, variant: str | None) -> None:
    if variant == "items" and task.weight == "sample_weights":
        raise NotApplicable("compute_loss_func gets the labels and their number, not the sample weights")


def train(task: Task, variant: str | None = None) -> Parameters:
    """Train by `Trainer.train`."""
    _check(task, variant)
    with tempfile.TemporaryDirectory() as folder:
        trainer, module = make_trainer(task, folder, variant)
        trainer.train()
    return parameters_of(module.net)


class Killed(Exception):
    """Raised to end a run inside a window."""


class Die(TrainerCallback):
    """Callback that simulates the end of the process inside a window."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.count()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


class LeaveEpoch(TrainerCallback):
    """Callback that sets `should_epoch_stop` inside the first window."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= 1
        control.should_epoch_stop = self.left == 0


def resume(task: Task, variant: str | None = None) -> Parameters:
    """Resume after a kill inside a window; it saves only at updates, so it repeats the window."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(Killed):
            make_trainer(task, folder, variant, Die(task.stop_after), save=True)[0].train()
        checkpoints = [name for name in os.listdir(folder) if name.startswith("checkpoint-")]
        assert checkpoints, "the run was killed before its first checkpoint"
        trainer, module = make_trainer(task, folder, variant, save=True)
        trainer.train(resume_from_checkpoint=True)
    return parameters_of(module.net)


def leave(task: Task, variant: str | None = None) -> Parameters:
    """End the first epoch inside a window by a callback."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, module = make_trainer(task, folder, variant, LeaveEpoch(task.stop_after))
        trainer.train()
    return parameters_of(module.net)


class _TimedModule(nn.Module):
    """Module that returns its own loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Any, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net(inputs), {"labels": labels})}


def window(work: Work, variant: str | None = None) -> TrainerWindow:
    """Return an endless `Trainer.train`, with its own loader by `get_train_dataloader`."""
    microbatches = work.microbatches()
    net, optimizer = work.build()

    def fit(loader: Any) -> None:
        class Endless(Trainer):
            def get_train_dataloader(self) -> Any:
                return loader

        with tempfile.TemporaryDirectory() as folder:
            steps = len(microbatches)
            arguments = arguments_for(folder=folder, accumulation_steps=steps, max_steps=10**9)
            trainer = Endless(model=_TimedModule(net), args=arguments, optimizers=(optimizer, None))  # type: ignore[arg-type]
            trainer.remove_callback(PrinterCallback)
            trainer.train()

    return TrainerWindow(fit, microbatches)
