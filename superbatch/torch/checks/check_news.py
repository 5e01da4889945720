"""News of a window: something that no check of the loss has compared yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class News(NamedTuple):
    """Feature that a window shows for the first time.

    Attributes:
        name: of the count, or of the event.
        contrast: relative difference of the samples that show it.
        samples: positions of those; empty: the micro-batches of smallest and largest loss show it.
        sure: whether it is checked whatever that costs.
    """

    name: str
    contrast: float = 1.0
    # Positions in the window, least count first; `MicrobatchList.pick` makes a micro-batch of them.
    samples: Sequence[int] = ()
    sure: bool = True
