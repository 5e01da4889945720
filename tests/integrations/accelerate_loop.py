"""Training loop of Accelerate over samples of unequal token counts, with and without superbatch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from superbatch.integrations.accelerate import make_gradient
from superbatch.torch import windows

SAMPLES, WORDS, LENGTH = 44, 11, 7
Way = Literal["large", "stock", "exact"]


def samples() -> tuple[Tensor, Tensor]:
    """Return sequences of 1 to 7 tokens."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    y = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator)
    y[torch.arange(LENGTH)[None] >= lengths[:, None]] = -100
    return x, y


def count(batch: Any) -> int:
    """Return the number of tokens of a batch."""
    return int((batch[1] != -100).sum())


def fresh(**options: Any) -> Accelerator:
    """Return a new Accelerator, without state of earlier ones in this process."""
    reset()
    return Accelerator(cpu=True, **options)


def reset() -> None:
    """Reset the process-wide state of Accelerate, but keep its process group."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    PartialState._reset_state()


class Loop:
    """Training in updates of 16 samples over all ranks; the last update of an epoch has 12.

    Args:
        way: ``"large"`` batches, Accelerate's own accumulation (``"stock"``), or ``"exact"``.
        accelerator: the Accelerator.
        dtype: dtype of the model.
        max_norm: gradient norm for clipping by Accelerate.
        epochs: number of epochs.
        gamma: factor of the learning rate at each scheduler step.
        first: number of samples.
    """

    def __init__(
        self,
        way: Way,
        accelerator: Accelerator,
        *,
        dtype: torch.dtype = torch.float64,
        max_norm: float | None = None,
        epochs: int = 2,
        gamma: float = 0.9,
        first: int = SAMPLES,
    ) -> None:
        torch.manual_seed(0)
        self.accelerator, self.way, self.max_norm, self.epochs = accelerator, way, max_norm, epochs
        bare = nn.Sequential(nn.Embedding(WORDS, 6), nn.Tanh(), nn.Linear(6, WORDS)).to(dtype)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.5, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
        size = (16 if way == "large" else 4) // accelerator.num_processes
        loader = DataLoader(TensorDataset(*(each[:first] for each in samples())), batch_size=size)
        prepared: Any = accelerator.prepare(bare, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.bare, self.steps, self.norms, self.losses = bare, 0, list[float](), list[float]()
        self.rates: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        """Return the mean over tokens."""
        x, y = batch
        return nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    def run(self) -> Loop:
        """Train."""
        gradient_of = None
        if self.way == "exact":
            gradient_of = make_gradient(
                self.accelerator, self.model, self.loss, microbatch_size=None, weight=count
            )
        for _ in range(self.epochs):
            if gradient_of is not None:
                for window in windows(self.loader, 4):
                    self.losses.append(gradient_of(window).loss)
                    self._step()
            else:
                for batch in self.loader:
                    with self.accelerator.accumulate(self.model):
                        loss = self.loss(batch)
                        self.accelerator.backward(loss)
                        self.losses.append(float(loss.detach()))
                        self._step()
        return self

    def _step(self) -> None:
        """Clip, step and zero gradients after a backward, as in any loop of Accelerate."""
        if self.accelerator.sync_gradients:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm or 1e9)
            self.norms.append(float(norm))
        self.optimizer.step()
        self.steps += self.accelerator.sync_gradients and not self.accelerator.optimizer_step_was_skipped
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.rates += self.scheduler.get_last_lr()


def largest_difference(a: Loop, b: Loop) -> float:
    """Return the largest difference of two loops' parameters."""
    pairs = zip(a.bare.parameters(), b.bare.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)
