"""Windows of a recipe with micro-batches of any size, to measure their memory and time.

The windows are those of a training: `superbatch.torch.Accumulator`, the recipe's loss, and the optimizer. But
the learning rate is so small that the weights do not change, and all micro-batches are taken from one batch,
repeatedly if it is too short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from superbatch.batch.tree import plan
from superbatch.errors import CoupledSamplesError
from superbatch.torch.memory.ledger import Ledger
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.window.participants.gradient_sum import LOW_PRECISION
from superbatch.window import Window

from ..recipes import Recipe
from ..recipes.models import dtype_of
from .arms import accumulator
from .on_torch import cast_batch

RATE = 1e-12  # learning rate: the optimizer works as with any other, and the weights do not change
WINDOW_SECONDS = 0.01  # of a timed window, about: clock resolution and call overhead then do not matter
MOST_MICROBATCHES = 64  # in a timed window
LONG = 0.25  # seconds of a micro-batch from which a timed window has only one
CPU_BLOCK = 64  # CPU allocations are rounded up to multiples of this, as in predictions; CUDA reports peaks


@dataclass(frozen=True)
class TrialRun:
    """A model and a batch of a recipe, to make windows of any size."""

    recipe: Recipe
    optimizer: str  # one of the recipe's
    model: nn.Module  # trained itself, because there may be no memory for a copy
    batch: Any  # in host memory; micro-batches are taken from it
    samples: int  # of the batch
    coupled: bool = False  # run micro-batches of coupled samples, for which the accumulator would raise

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def microbatch(self, samples: int, *, start: int = 0) -> Any:
        """Return a micro-batch of the batch."""
        start = min(start, self.samples - samples)  # the last one may overlap the one before
        return plan(self.batch).take(start, start + samples)

    def window_of(self, samples: int, *, count: int) -> Window:
        """Return a window of `count` micro-batches, which repeat if the batch has fewer."""
        available = max(1, self.samples // samples)
        return Window([self.microbatch(samples, start=i % available * samples) for i in range(count)])

    def trainer(self) -> Trainer:
        """Return a trainer with a new optimizer, which has no state yet."""
        self.model.zero_grad(set_to_none=True)
        optimizer = self.recipe.optimizers[self.optimizer](self.model.parameters(), RATE)
        return Trainer(self.recipe, self.model, optimizer, coupled=self.coupled)

    def predicted(self, predict: Callable[..., Any], samples: int) -> Any:
        """Call `predict`, such as `predict_peak`, for a training with micro-batches of a size."""
        trainer = self.trainer()
        return predict(
            trainer.loss_fn,
            self.microbatch(samples),
            models=[self.model],
            optimizers=[trainer.optimizer],
            # The batch is in host memory: on another device micro-batches are copies.
            device=None if self.device.type == "cpu" else self.device,
            gradient_sum="auto",
        )

    def peak(self, samples: int) -> int:
        """Measure the peak of a training: of a window of one micro-batch, then one of two.

        The first window creates the optimizer's state. The second micro-batch of the second window needs
        memory for that state, the gradients and the activations at once, as all later ones do.
        """
        trainer = self.trainer()

        def begin() -> None:
            for count in (1, 2):
                trainer.time(self.window_of(samples, count=count))

        if self.device.type != "cpu":
            return peak_bytes(begin, device=self.device)
        with Ledger(self.device, rounded=CPU_BLOCK) as ledger:
            begin()
        return ledger.peak


class Trainer:
    """Trains a model in windows, and measures their times."""

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: Any, *, coupled: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss_fn: Callable[[Any], Any] = recipe.loss_fn(model)
        self._returned = recipe.weight == "returned"
        self._accumulator = accumulator(
            replace(recipe, batchnorm="per_microbatch") if coupled else recipe,
            model,
            optimizer,
            loss_fn=self.loss_fn,
            # "auto" would sum these few micro-batches in low precision, those of a long window in float32.
            gradient_sum=torch.float32 if dtype_of(model) in LOW_PRECISION else None,
            check=False,  # `coupling_error` has run the check, which calls the loss more often
        )

    def time(self, window: Window) -> tuple[float, float]:
        """Make an update; return the mean seconds of a micro-batch, and the seconds after the last one."""
        with self._accumulator.window(window) as open_window:
            start = time.perf_counter()
            for microbatch in open_window:
                loss = self.loss_fn(microbatch)
                open_window.backward(*(loss if self._returned else (loss,)))
                del loss  # else it would keep the graph during the next forward pass
            self._wait()
            end = time.perf_counter()
        self._wait()
        return (end - start) / len(window), time.perf_counter() - end

    def _wait(self) -> None:
        """Wait for the device, whose kernels run asynchronously."""
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def prepare_trial(
    recipe: Recipe, *, optimizer: str, dtype: str, device: str | torch.device, samples: int
) -> TrialRun:
    """Make the model and the batch of a recipe; samples repeat if the recipe has fewer than the batch."""
    batch = cast_batch(recipe.batch(torch.arange(samples) % recipe.samples), dtype)
    model = recipe.model(0).to(device=device, dtype=getattr(torch, dtype))
    return TrialRun(recipe, optimizer, model, batch, samples)


def coupling_error(trial: TrialRun) -> str | None:
    """Make an update of a few samples; return the error if the accumulator refuses coupled samples."""
    recipe, few, model = trial.recipe, min(4, trial.samples), trial.model
    optimizer = recipe.optimizers[trial.optimizer](model.parameters(), RATE)
    accumulate = accumulator(recipe, model, optimizer, microbatch_size=-(-few // 2))
    try:
        accumulate(trial.microbatch(few))
    except CoupledSamplesError as error:
        return str(error)
    return None


def microbatches_to_time(seconds: float) -> int:
    """Return the number of micro-batches of a timed window."""
    if seconds * MOST_MICROBATCHES <= WINDOW_SECONDS:
        return MOST_MICROBATCHES
    return max(1 if seconds > LONG else 2, round(WINDOW_SECONDS / seconds))
