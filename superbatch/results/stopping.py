"""Result of `superbatch.torch.tuning.update_until`."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StoppedUpdate:
    """The record of an update whose window was ended because of its gradient.

    Attributes:
        loss: mean over what was seen.
        microbatches: how many were seen.
        weight: samples (or what else was counted) that were seen.
        factor: ``weight / planned``: how many times as long the update is as one of the planned weight.
        ratio: noise over signal, as estimated at the end; None where the signal came out below zero.
        stopped: whether it was good enough; False: `most` micro-batches were seen, or the data ended.
    """

    loss: float
    microbatches: int
    weight: float
    factor: float
    ratio: float | None
    stopped: bool
