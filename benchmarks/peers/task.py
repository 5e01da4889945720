"""Task of every column: a small training without any library."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

Batch = dict[str, Any]
"""``inputs`` (what the model takes), ``labels`` and sometimes ``weights``, stacked over the samples."""

Parameters = dict[str, Tensor]


class NotApplicable(Exception):
    """Raised if a library has no documented way to do this; the text gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Training with samples in a fixed order, micro-batches of a fixed size and windows of K micro-batches.

    ``loss`` and ``loss_sum`` take the model's outputs and the micro-batch: the mean, and its numerator for
    recipes that divide by the window's items themselves. ``weigh`` is their divisor. ``weight`` names the
    same divisor for superbatch's helpers.
    """

    model: Callable[[], nn.Module]
    samples: Sequence[Batch]
    microbatch_size: int
    accumulation_steps: int
    loss: Callable[[Tensor, Batch], Tensor]
    loss_sum: Callable[[Tensor, Batch], Tensor]
    weigh: Callable[[Batch], float]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    weight: Literal["samples", "tokens", "sample_weights", "class_weights", "share"] = "samples"
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    max_grad_norm: float | None = None
    reduction: Literal["mean", "sum"] = "mean"
    epochs: int = 1
    stop_after: int = 0
    sample_rng: bool = False
    skip_nonfinite: bool = False

    def loader(self) -> DataLoader[Batch]:
        """Return a new loader of the micro-batches, in order."""
        return DataLoader(self.samples, batch_size=self.microbatch_size)  # type: ignore[arg-type]  # a list is a dataset

    def windows(self) -> Iterator[list[Batch]]:
        """Yield the windows of one epoch: K micro-batches each, fewer in the tail."""
        microbatches = list(self.loader())
        for first in range(0, len(microbatches), self.accumulation_steps):
            yield microbatches[first : first + self.accumulation_steps]

    def whole(self) -> "Task":
        """Return the same training without accumulation: each window is one large batch."""
        return replace(
            self, microbatch_size=self.microbatch_size * self.accumulation_steps, accumulation_steps=1
        )

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler | None]:
        """Return model, optimizer and scheduler, the same in every call, and reset torch's random state."""
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        torch.manual_seed(1)
        return model, optimizer, scheduler


def parameters_of(model: nn.Module) -> Parameters:
    """Return copies of the named parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def relative_error(update: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Return the maximum over parameters of ``||update - truth|| / ||truth||``, in float64.

    Raises:
        AssertionError: the truth does not move a parameter, so that the number would say nothing.
    """
    errors = []
    for name, expected in truth.items():
        norm = expected.double().norm()
        assert norm > 0, f"vacuous: the reference does not move {name}"
        errors.append(((update[name].double() - expected.double()).norm() / norm).item())
    return float("nan") if any(error != error for error in errors) else max(errors)
