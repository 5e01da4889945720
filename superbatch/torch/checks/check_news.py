"""News of a window: what it shows that no check of the loss has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class News(NamedTuple):
    """Feature that a window shows for the first time.

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
