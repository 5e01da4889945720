"""Participant for the scale of a `torch.amp.GradScaler`, which must not change during a window.

All losses of a window are multiplied by one scale, so their gradients can be summed and unscaled once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import WindowError

from ..participant import no_savepoint


class LossScale:
    """Scale of the losses of a window.

    Args:
        scaler: a `torch.amp.GradScaler` that is enabled.
        device: device of the losses.
        scaled_by_host: whether the user's ``backward=`` scales each loss itself.
        unscaled: whether the window unscales its gradient at its end.

    Attributes:
        value: the scale at `begin`; None before.
    """

    def __init__(
        self, scaler: Any, device: torch.device, *, scaled_by_host: bool = False, unscaled: bool = True
    ) -> None:
        self._scaler = scaler
        self._device, self._scaled_by_host, self._unscaled = device, scaled_by_host, unscaled
        self.value: float | None = None

    def begin(self) -> None:
        """Read the scale, and make the scaler create its scale tensor.

        GradScaler creates the tensor in its first scale(loss). A window may have no loss: its weight on this
        rank may be 0, or it was resumed after the last backward.
        """
        self._scaler.scale(torch.zeros((), device=self._device))
        self.value = self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale."""
        # accelerator.backward scales the loss itself, and scaling it here too would square the scale.
        return loss if self._scaled_by_host else self._scaler.scale(loss)

    def require(self) -> None:
        """Raise `WindowError` if the scale has changed during the window, e.g. by another window."""
        if self._scaler.get_scale() != self.value:
            raise WindowError(
                f"The GradScaler's scale changed from {self.value} to {self._scaler.get_scale()} inside the "
                "window, so its sum mixes two scales. Use one GradScaler per Accumulator."
            )

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: the scale does not change."""

    def rollback(self) -> bool:
        """No-op: the scale does not change."""
        return True

    def restart(self) -> None:
        """No-op: the scale does not change."""

    def restore(self) -> None:
        """Allow the scaler to unscale again, if the window failed after unscaling; the scale is unchanged."""
        # update() with a number keeps the scale and clears the flag "already unscaled". It raises for a
        # scaler that has not scaled anything.
        if self._unscaled and getattr(self._scaler, "_growth_tracker", 0) is not None:
            self._scaler.update(self._scaler.get_scale())

    def commit(self) -> None:
        """No-op: the update rule has updated the scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `WindowError` if the present scale is not that of the saved sums."""
        require_scale(self.value, state)


def require_scale(value: float | None, state: Mapping[str, Any]) -> None:
    """Raise `WindowError` if a scale (None: losses are not scaled) is not that of the saved sums."""
    if state["scale"] != value:
        raise WindowError(
            f"The GradScaler's scale is {value}, but the scale of the saved sums is {state['scale']}. Load "
            "the scaler's state that was saved with the window before you resume it."
        )
