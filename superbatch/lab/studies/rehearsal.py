"""Real windows of a recipe with micro-batches of any size, to be measured: their memory and their time.

The windows are those of training - `superbatch.torch.Accumulator`, the recipe's loss, the optimizer - but for
two things: the learning rate is so small that the weights stay what they are, and each micro-batch is taken
from one batch, again and again where that is too short.
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
from .on_torch import cast_batch
from .participants import accumulator

RATE = 1e-12  # learning rate: an optimizer works as hard as with any other, and the weights do not wander off
# A window that is timed lasts about so long at least: a clock's ticks and a call's start vanish in it.
WINDOW_SECONDS = 0.01
MOST_MICROBATCHES = 64

# Bytes that the allocator of the CPU rounds to, as predictions do; that of CUDA counts for itself.
CPU_BLOCK = 64
LONG = 0.25  # seconds of a micro-batch from which one is enough for a window that is timed


@dataclass(frozen=True)
class Rehearsal:
    """A recipe, ready to make windows of any size."""

    recipe: Recipe
    optimizer: str  # one of the recipe's
    model: nn.Module  # the only one: a copy might be what does not fit
    batch: Any  # on the host; micro-batches are taken from it
    samples: int
    coupled: bool = False  # allow what the accumulator refuses for the sake of exactness

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def take(self, samples: int, *, start: int = 0) -> Any:
        """Take a micro-batch of the batch."""
        start = min(start, self.samples - samples)  # the batch may end too early
        return plan(self.batch).take(start, start + samples)

    def window_of(self, samples: int, *, count: int) -> Window:
        """Make a window of `count` micro-batches, which repeat where the batch has fewer."""
        available = max(1, self.samples // samples)
        return Window([self.take(samples, start=i % available * samples) for i in range(count)])

    def trainer(self) -> Trainer:
        """Make an optimizer that has no state yet, and what trains with it."""
        self.model.zero_grad(set_to_none=True)
        optimizer = self.recipe.optimizers[self.optimizer](self.model.parameters(), RATE)
        return Trainer(self.recipe, self.model, optimizer, coupled=self.coupled)

    def predicted(self, predict: Callable[..., Any], samples: int) -> Any:
        """Call a prediction of memory with the arguments of a training in micro-batches of a size."""
        trainer = self.trainer()
        return predict(
            trainer.loss_fn,
            self.take(samples),
            models=[self.model],
            optimizers=[trainer.optimizer],
            # The batch lies on the host: elsewhere micro-batches are copies.
            device=None if self.device.type == "cpu" else self.device,
            gradient_sum="auto",
        )

    def peak(self, samples: int) -> int:
        """Measure the peak of a training that begins: a window of one micro-batch, then one of two.

        The first window makes the optimizer's state. In the second one it lies beside the activations and,
        for its second micro-batch, beside the gradients, as in all that follow.
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
    """A model that is being trained, with the times of its windows."""

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: Any, *, coupled: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss_fn: Callable[[Any], Any] = recipe.loss_fn(model)
        self._returned = recipe.weight == "returned"
        self._accumulator = accumulator(
            replace(recipe, batchnorm="per_microbatch") if coupled else recipe,
            model,
            optimizer,
            loss_fn=self.loss_fn,
            # Two micro-batches stand for many: low precision is then summed in float32.
            gradient_sum=torch.float32 if dtype_of(model) in LOW_PRECISION else None,
            check=False,  # it runs the loss more often on the first window; `refusal` has asked already
        )

    def time(self, window: Window) -> tuple[float, float]:
        """Make an update; return the mean seconds of a micro-batch, and those after the last one."""
        with self._accumulator.window(window) as open_window:
            start = time.perf_counter()
            for microbatch in open_window:
                loss = self.loss_fn(microbatch)
                if self._returned:
                    open_window.backward(*loss)
                else:
                    open_window.backward(loss)
                del loss
            self._wait()
            end = time.perf_counter()
        self._wait()
        return (end - start) / len(window), time.perf_counter() - end

    def _wait(self) -> None:
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def prepare(
    recipe: Recipe, *, optimizer: str, dtype: str, device: str | torch.device, samples: int
) -> Rehearsal:
    """Make a recipe ready; its samples repeat where it has fewer than the batch."""
    batch = cast_batch(recipe.batch(torch.arange(samples) % recipe.samples), dtype)
    model = recipe.model(0).to(device=device, dtype=getattr(torch, dtype))
    return Rehearsal(recipe, optimizer, model, batch, samples)


def refusal(rehearsal: Rehearsal) -> str | None:
    """Ask the accumulator whether it takes a recipe: one update of a few samples."""
    recipe, few, model = rehearsal.recipe, min(4, rehearsal.samples), rehearsal.model
    optimizer = recipe.optimizers[rehearsal.optimizer](model.parameters(), RATE)
    accumulate = accumulator(recipe, model, optimizer, microbatch_size=-(-few // 2))
    try:
        accumulate(rehearsal.take(few))
    except CoupledSamplesError as error:
        return str(error)
    return None


def microbatches_to_time(seconds: float) -> int:
    """Return the number of micro-batches of a timed window."""
    if seconds * MOST_MICROBATCHES <= WINDOW_SECONDS:
        return MOST_MICROBATCHES
    return max(1 if seconds > LONG else 2, round(WINDOW_SECONDS / seconds))
