"""Loss as Caffe displays it: the mean over the last ``average_loss`` updates."""

from __future__ import annotations

# pyright: strict
from collections.abc import Mapping
from typing import Any

from ..integers import positive_int


class SmoothedLoss:
    """Mean of the last `average_loss` losses, as in Caffe's log; at first, the mean of all losses so far.

    The arithmetic is that of `Solver::UpdateSmoothedLoss` (a running mean, corrected in place), so the value
    equals the one in the log to rounding.

    Args:
        average_loss: number of updates in the mean.

    Raises:
        InputError: `average_loss` is no positive int.

    Examples:
        >>> smoothed = SmoothedLoss(2)
        >>> [smoothed.add(loss) for loss in (4.0, 2.0, 1.0)]
        [4.0, 3.0, 1.5]
    """

    def __init__(self, average_loss: int = 1) -> None:
        self._length = positive_int("average_loss", average_loss)
        self._losses: list[float] = []
        self._next = 0
        self.value = 0.0

    def add(self, loss: float) -> float:
        """Add the loss of an update (the mean over its micro-batches) and return the smoothed loss."""
        if len(self._losses) < self._length:
            self._losses.append(loss)
            size = len(self._losses)
            self.value = (self.value * (size - 1) + loss) / size
        else:
            # Corrected in place, as Caffe does: a new sum would differ in the last digits.
            self.value += (loss - self._losses[self._next]) / self._length
            self._losses[self._next] = loss
        self._next = (self._next + 1) % self._length
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save. Caffe itself does not save it."""
        return {"losses": list(self._losses), "next": self._next, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: from `state_dict`, with the same `average_loss`.
        """
        self._losses, self._next = list(state["losses"]), int(state["next"])
        self.value = float(state["value"])
