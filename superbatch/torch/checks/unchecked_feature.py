"""Feature of a window that no check of the loss has compared yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class UncheckedFeature(NamedTuple):
    """Feature that a window has for the first time, e.g. unequal token counts.

    Attributes:
        name: name of the count, or of the event.
        contrast: relative difference between the samples that differ most in it.
        samples: positions of these samples; empty: the micro-batches with the smallest and largest loss.
        sure: it is checked regardless of the budget for checks.
    """

    name: str
    contrast: float = 1.0
    # Positions in the window, least count first; `MicrobatchList.pick` makes a micro-batch of them.
    samples: Sequence[int] = ()
    sure: bool = True
