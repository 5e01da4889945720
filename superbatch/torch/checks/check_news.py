"""News of a window: what it shows that no check of the loss has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from superbatch.normalize import Number

from ..window.microbatches import Pieces


class News(NamedTuple):
    """What a window shows for the first time.

    Attributes:
        name: of what it is.
        contrast: how unequal the samples are that show it.
        samples: those; none: micro-batches of the smallest and the largest loss show it.
        sure: whether it is worth a check whatever that costs.
    """

    name: str
    contrast: float = 1.0
    samples: Sequence[int] = ()
    sure: bool = True


class Shown(NamedTuple):
    """A window whose micro-batches all went forward.

    Attributes:
        pieces: its micro-batches.
        losses: of each.
        weights: of each; 0 for those that were left out.
        took_part: returns the micro-batches whose losses are in the sum.
    """

    pieces: Pieces
    losses: Sequence[float]
    weights: Sequence[Number]
    took_part: Callable[[], Sequence[int]]
