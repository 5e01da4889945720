"""Setting common to all runs of a comparison, in every backend: arms, updates, order of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .splits import Split

CURVE_POINTS = 50
TAILS_IN_A_RUN = 10  # at least this many tails, so that even a short run shows what they do
Way = (
    Literal["real batch", "accumulator", "plain accumulation", "mean of means", "fixed tail divisor"]
    | Literal["again", "missing 1/K", "another batch"]  # of a survey alone
)
NAMED_BY_SPLIT = ("real batch", "accumulator", "another batch")
Tick = Callable[[int], None]  # takes the micro-batches, or other work, done since the last call
# What the wrong ways do, in words.
WRONG: Mapping[Way, str] = {
    "mean of means": "wrong: the mean of each micro-batch counts 1/K, whatever the micro-batch weighs",
    "fixed tail divisor": "wrong: divides by the K of a full window where a window is shorter",
}


@dataclass(frozen=True)
class ArmPlan:
    """A split and the way its updates are made."""

    split: Split
    way: Way
    claim: Any  # what the arm says of itself: a `Claim` of the report, of surveys a `SurveyClaim`

    @property
    def name(self) -> str:
        """The split, and the way where the split does not say it."""
        return self.split.name if self.way in NAMED_BY_SPLIT else f"{self.split.name} {self.way}"


@dataclass(frozen=True)
class Setting:
    """Setting common to all runs of a comparison. It can be sent to another process."""

    updates: int  # of each run
    batch_size: int  # samples of one update
    optimizer: str  # one of the recipe's
    learning_rate: float  # constant over the run
    arms: tuple[ArmPlan, ...] = ()  # the real batch first
    tail: int | None = None  # samples of each epoch's short last batch; None: epochs run into each other
    dtype: str = "float32"  # or "float64"; on torch any name of a dtype
    backend: str = "torch"  # what trains


def batches(draw: Callable[[], np.ndarray], samples: int, setting: Setting) -> Iterator[np.ndarray]:
    """Cut permutation after permutation into the batches of a run.

    Without a tail the permutations are concatenated and cut into batches. With one, each permutation is used
    up to a short last batch, and the samples beyond it are left out; at least ten such ends fall into a run.
    """
    size, tail, left = setting.batch_size, setting.tail, setting.updates
    pending = np.empty(0, np.int64)
    often = max(1, setting.updates // TAILS_IN_A_RUN - 1)
    while left > 0:
        pending = np.concatenate([pending, draw()])
        full = len(pending) // size if tail is None else min((samples - tail) // size, often)
        found = [pending[start : start + size] for start in range(0, full * size, size)]
        if tail is not None:
            found.append(pending[full * size : full * size + tail])
        pending = pending[full * size :] if tail is None else pending[:0]
        yield from found[:left]
        left -= len(found)


def curve_updates(updates: int) -> tuple[int, ...]:
    """The last update of each of up to 50 near-equal stretches of a run."""
    points = min(CURVE_POINTS, updates)
    return tuple((point + 1) * updates // points for point in range(points))
