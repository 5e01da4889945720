"""Participant for the scale of a `torch.amp.GradScaler`, which stays the same during a window."""

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
        device: of the losses.
        scaled_by_host: the backward of somebody else scales each loss.
        unscaled: the window unscales its gradient at its end.

    Attributes:
        value: the scale since `begin`; None before.
    """

    def __init__(
        self, scaler: Any, device: torch.device, *, scaled_by_host: bool = False, unscaled: bool = True
    ) -> None:
        self._scaler = scaler
        self._device, self._scaled_by_host, self._unscaled = device, scaled_by_host, unscaled
        self.value: float | None = None

    def begin(self) -> None:
        """Make the scale, as the first loss of a scaler does.

        A window may have no loss that makes it: without weight on this rank, or resumed after a restart.
        """
        # GradScaler makes its scale tensor lazily in scale(); get_scale() before that is only the initial
        # value.
        self._scaler.scale(torch.zeros((), device=self._device))
        self.value = self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale."""
        # accelerator.backward scales the loss itself; scaling here too would square the scale.
        return loss if self._scaled_by_host else self._scaler.scale(loss)

    def require(self) -> None:
        """Check that all losses of the window were scaled alike.

        Raises:
            WindowError: the scaler was updated meanwhile, in another window.
        """
        # A second window that updated the scaler meanwhile mixes two scales in one sum.
        if self._scaler.get_scale() != self.value:
            raise WindowError(
                f"The GradScaler's scale went from {self.value} to {self._scaler.get_scale()} inside the "
                "window, so its sum mixes scales. Use one GradScaler per Accumulator."
            )

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: the scale stays."""

    def rollback(self) -> bool:
        """No-op: the scale stays."""
        return True

    def restart(self) -> None:
        """No-op: the scale stays."""

    def restore(self) -> None:
        """Let a scaler whose window failed after unscaling unscale the next one; its scale stays."""
        # A scaler that has scaled nothing has no scale yet, and would refuse.
        # update() with a number keeps the scale and clears the flag "already unscaled".
        if self._unscaled and getattr(self._scaler, "_growth_tracker", 0) is not None:
            self._scaler.update(self._scaler.get_scale())

    def commit(self) -> None:
        """No-op: the update rule has updated the scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that losses are scaled like those in the saved sums.

        Raises:
            WindowError: they are not.
        """
        require_scale(self.value, state)


def require_scale(value: float | None, state: Mapping[str, Any]) -> None:
    """Check that losses are scaled like those in the saved sums.

    Args:
        value: the scale now; None: losses are not scaled.
        state: of a saved window.

    Raises:
        WindowError: they are not.
    """
    # None equals None: neither window had a scaler.
    if state["scale"] != value:
        raise WindowError(
            f"The GradScaler's scale is {value}, but the saved sums were scaled by {state['scale']}."
            " Load the scaler's state of the same moment before you resume the window."
        )
