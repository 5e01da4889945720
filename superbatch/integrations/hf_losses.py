"""Gradients of a window for the losses of a Trainer: several means, a sum, or coupled samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..errors import InputError, SplitError
from ..torch.gradient import Gradient, WholeGradient
from ..torch.options import Split
from ..torch.virtual.block import virtual_batch
from ..torch.window.joining import joined
from ..window import Window
from .hf_calls import LossCalls
from .hf_terms import Terms, checked_terms

Samples = Mapping[str, Any]
WindowGradient = Callable[[list[dict[str, Any]]], float]
"""Function of the micro-batches of a window that returns the loss and adds the gradient to ``.grad``."""


@dataclass
class HostLoss:
    """Loss that a Trainer computes for samples.

    Attributes:
        trainer: the Trainer.
        model: its model, without wrappers.
        wrapped: its model as it is trained, such as in DistributedDataParallel.
        as_inputs: returns the inputs of the Trainer for samples.
        items: number of items of the window, as counted by the Trainer.
        calls: participant of the windows that records calls of the loss.
    """

    trainer: Trainer
    model: nn.Module
    wrapped: nn.Module
    as_inputs: Callable[[Samples], Any]
    items: Any = None
    calls: LossCalls = field(default_factory=LossCalls)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.trainer.accelerator.num_processes

    @property
    def cuts(self) -> bool:
        """True if the Trainer passes the whole batch, and superbatch splits it."""
        return self.trainer.args.gradient_accumulation_steps == 1

    @property
    def has_no_items(self) -> bool:
        """True if no rank has labels in the window; False if the Trainer counts only its own rank's."""
        return self.items is not None and self.items_are_global and not bool(self.items)

    @property
    def items_are_global(self) -> bool:
        """True if the Trainer counts the items of all ranks."""
        return self.ranks == 1 or bool(self.trainer.args.average_tokens_across_devices)

    def on_all_ranks(self, value: bool) -> bool:
        """Return whether `value` is true on every rank.

        Args:
            value: the value on this rank.
        """
        if self.ranks == 1:
            return value
        flag = torch.tensor([value], device=self.trainer.args.device)
        return bool(torch.as_tensor(self.trainer.accelerator.gather(flag)).all())

    def of(self, samples: Samples, items: Any = None, model: nn.Module | None = None) -> Tensor:
        """Return the loss of samples: their mean, or their sum divided by a number of items."""
        with self.calls.one_of(self.trainer), self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(
                self.wrapped if model is None else model, self.as_inputs(samples), num_items_in_batch=items
            )
        assert isinstance(loss, Tensor)
        return loss

    def part(self, samples: Samples) -> Tensor:
        """Return the contribution of samples to the loss of the window."""
        return self.of(samples, self.items)

    def with_outputs(self, samples: Samples, model: nn.Module | None = None) -> tuple[Tensor, Any]:
        """Return the mean over samples, and the outputs of the model."""
        with self.calls.one_of(self.trainer), self.trainer.compute_loss_context_manager():
            loss, outputs = self.trainer.compute_loss(
                self.wrapped if model is None else model, self.as_inputs(samples), return_outputs=True
            )
        return loss, outputs


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate a model in this context without side effects: eval mode, no graph, random state restored.

    Args:
        model: the model.
    """
    # Module by module: a frozen part in eval mode must not be in train mode afterwards.
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for module in trained:
            module.training = True


def separated(loss: HostLoss, terms: Terms, samples: Samples, **options: Any) -> Gradient:
    """Return a `Gradient` for a loss that is a sum of means over a window.

    Args:
        loss: loss of the Trainer.
        terms: terms of the model's loss.
        samples: a micro-batch for a trial forward.
        options: options of `Gradient`.
    """
    # A model with image patches has more logits than input ids: only its outputs show how many.
    if terms.fit is not None:
        with evaluating(loss.model):
            outputs = loss.with_outputs(samples, loss.model)[1]
        terms = terms.fit(samples, outputs) or terms

    def losses(microbatch: Samples) -> dict[str, Tensor]:
        mean, outputs = loss.with_outputs(microbatch)
        return checked_terms(terms, loss.model, microbatch, mean, outputs)

    config = getattr(loss.model, "config", None)
    return Gradient(loss.wrapped, losses, **terms.options(config), **options)


def summed(loss: HostLoss, **options: Any) -> Gradient:
    """Return a `Gradient` for a loss that is a sum divided by the number of items of the window.

    Args:
        loss: loss of the Trainer.
        options: options of `Gradient`.
    """

    def share(microbatch: Samples) -> Tensor:
        return loss.part(microbatch) / loss.ranks  # the Trainer reports the mean over ranks

    return Gradient(loss.wrapped, share, reduction="total", **options)


def of_windows(
    loss: HostLoss, gradient_of: Gradient, check: Callable[[list[dict[str, Any]]], bool], *, by_items: bool
) -> WindowGradient:
    """Return a function for the gradient of the micro-batches that were collected.

    Args:
        loss: loss of the Trainer.
        gradient_of: gradient of a batch or of a window.
        check: called with each window until it returns True.
        by_items: the loss divides by the number of items of the window.
    """
    checked = False

    def of_window(taken: list[dict[str, Any]]) -> float:
        nonlocal checked
        if by_items and loss.has_no_items:  # the loss would divide by zero
            return 0.0
        checked = checked or check(taken)
        return gradient_of(taken[0] if loss.cuts else Window(taken)).loss

    return of_window


def coupled(loss: HostLoss, microbatch_size: Any, **options: Any) -> WindowGradient:
    """Return a function that computes the gradient of a loss that couples the samples of a window.

    Args:
        loss: loss of the Trainer.
        microbatch_size: as in `WholeGradient`.
        options: options of `WholeGradient`.
    """
    if loss.ranks == 1:
        whole = WholeGradient(loss.wrapped, loss.part, microbatch_size=microbatch_size, **options)
        return lambda taken: whole(_joined(taken)).loss

    def of_this_rank(taken: list[dict[str, Any]]) -> float:  # the Trainer couples no samples across ranks
        loss.calls.begin()  # no window announces this call
        with virtual_batch(loss.wrapped, microbatch_size or "auto") as virtual:
            window_loss = loss.part(virtual(_joined(taken)))
            loss.trainer.accelerator.backward(window_loss)
            return window_loss.item()  # inside the block, while the value is available

    return of_this_rank


def split_of(samples: Samples) -> Split:
    """Return the inputs that are lists with an object for each sample, such as the boxes of an image.

    Args:
        samples: a micro-batch.

    Examples:
        >>> import torch
        >>> split_of({"pixel_values": torch.zeros(1, 2), "labels": [{"boxes": torch.zeros(3, 4)}]})
        Split(unsplit=(), per_sample=('labels',))
    """
    count = next((len(value) for value in samples.values() if isinstance(value, Tensor) and value.ndim), 0)

    def is_per_sample(values: Any) -> bool:
        if not isinstance(values, list | tuple) or len(values) != count:
            return False
        have_rows = all(isinstance(each, Tensor) and each.ndim and len(each) == count for each in values)
        return count == 1 or not have_rows  # a list of feature maps has a tensor of all samples per level

    return Split(per_sample=[name for name, value in samples.items() if is_per_sample(value)])


def _joined(microbatches: list[dict[str, Any]]) -> Any:
    """Return the batch of a window whose samples are coupled.

    Raises:
        InputError: the shapes of the micro-batches differ, or they have lists of objects.
    """
    if lists := split_of(microbatches[0]).per_sample:
        raise InputError(
            f"The samples of this batch are coupled, but {lists[0]!r} is a list with an object for each "
            "sample. Return one padded tensor from the collator instead."
        )
    try:
        return joined(microbatches)
    except SplitError as error:
        raise InputError(
            "The samples of this batch are coupled, but its micro-batches have different shapes and cannot "
            "be joined. Set gradient_accumulation_steps=1 and per_device_train_batch_size to the whole "
            f"batch; superbatch splits it exactly. ({error})"
        ) from error
