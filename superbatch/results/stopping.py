"""Result of `superbatch.torch.tuning.update_until`."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StoppedUpdate:
    """The record of an update whose window ended when its gradient was precise enough.

    Attributes:
        loss: mean loss of the micro-batches in the window.
        microbatches: number of micro-batches in the window.
        weight: weight of the window, by default its samples.
        factor: ``weight / planned``, the size of the update relative to one of the planned weight.
        ratio: noise over signal, estimated at the end; None if the estimate of the signal was negative.
        stopped: True if the gradient was precise enough; False if the window had `most` micro-batches, or the
            data ended.
    """

    loss: float
    microbatches: int
    weight: float
    factor: float
    ratio: float | None
    stopped: bool
