"""Result of one call of an accumulator."""

from __future__ import annotations

# pyright: strict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Update:
    """The record of one update: Python numbers only, so it keeps no graph and no activation alive.

    Attributes:
        loss: weighted mean loss of the batch, over all ranks, before the update; NaN if the weight is 0.
        grad_norm: 2-norm of the normalised gradient before clipping; None if the gradient never exists as a
            whole (accumulation into the momentum buffer), or the window had no weight.
        weight: weight ``W`` of the window, over all ranks; 1 if the loss has no common divisor
            (``reduction="total"``, several terms).
        samples: samples of the window on this rank; None if they cannot be counted.
        microbatches: micro-batches of the window on this rank.
        learning_rates: learning rate of each parameter group in this update.
        skipped: why no update was made; None if one was made.
        dropped: indices of micro-batches that were dropped because they were not finite.
        failures: number of micro-batches that ran out of memory and were recomputed in smaller ones.
        seconds: wall time from the start of the window to the end of the update.
        losses: loss of each term, normalised by its own weight; empty if `loss_fn` returns one loss.
        weights: weight ``W`` of each term; empty if `loss_fn` returns one loss.

    Examples:
        >>> Update(0.5, grad_norm=1.0, weight=64, samples=64, microbatches=4, learning_rates=(0.1,)).made
        True
    """

    loss: float
    grad_norm: float | None
    weight: int | float
    samples: int | None
    microbatches: int
    learning_rates: tuple[float, ...]
    skipped: str | None = None
    dropped: tuple[int, ...] = ()
    failures: int = 0
    seconds: float = 0.0
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    weights: Mapping[str, int | float] = field(default_factory=dict[str, int | float])

    @property
    def made(self) -> bool:
        """True if parameters were updated."""
        return self.skipped is None
