"""Feature of a window that no check of the loss has compared yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..window.microbatches import CheckedWindow

WINDOWS = 100
"""Later checks may make one call of `loss_fn` per this many micro-batches. Also the period, in updates, of
the windows that inspect all counts."""


class UncheckedFeature(NamedTuple):
    """Feature that a window has for the first time, e.g. unequal token counts.

    Attributes:
        name: name of the count, or of the event.
        contrast: relative difference between the samples that differ most in it.
        samples: positions of these samples in the window, least count first; empty: the micro-batches with
            the smallest and largest loss.
        sure: it is checked regardless of the budget for checks.
    """

    name: str
    contrast: float = 1.0
    samples: Sequence[int] = ()
    sure: bool = True


def unequal_weights(window: CheckedWindow, name: str) -> list[UncheckedFeature]:
    """Return a feature if samples of two micro-batches have different weights; else an empty list."""
    samples, weights = window.microbatches.samples, window.weights
    some = [index for index, weight in enumerate(weights) if weight]
    if samples is None or not some:
        return []
    each = [weight / count for weight, count in zip(weights, samples, strict=True)]
    least, most = min(some, key=each.__getitem__), max(some, key=each.__getitem__)
    # Equal weights may differ by the rounding of the division.
    if not each[least] < each[most] * (1 - 1e-9):
        return []
    pair = window.microbatches.first_samples_of_two(least, most, 1)
    return [UncheckedFeature(name, 1 - each[least] / each[most], pair)]


def inspects_all_counts(updates: int) -> bool:
    """Return whether a window inspects all counts: after 1, 2, 4, ... 64 updates, then after every 100.

    The answer depends on `updates` alone, so all ranks inspect the same windows in full.

    Examples:
        >>> [updates for updates in range(1, 401) if inspects_all_counts(updates)]
        [1, 2, 4, 8, 16, 32, 64, 100, 200, 300, 400]
    """
    return updates % WINDOWS == 0 or (updates < WINDOWS and updates.bit_count() == 1)
