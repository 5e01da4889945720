"""Leaving a micro-batch that is not finite out of the sum, its weight with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superbatch.errors import WindowError, explain

from .participants.batchnorm import Pooled
from .participants.buffer_gradients import InBuffers

if TYPE_CHECKING:
    from .open_window import WindowInFlight


def keep_or_drop(window: WindowInFlight, index: int, *, again: bool) -> None:
    """Add the gradient of the last micro-batch to the sum if it is finite; else leave the micro-batch out.

    Args:
        window: with ``nonfinite="skip_microbatch"``.
        index: of the micro-batch.
        again: whether it had a backward before.

    Raises:
        WindowError: it had.
    """
    place, plan = window._place, window._plan
    assert isinstance(place, InBuffers)
    if again:
        raise WindowError(
            explain(
                f"a second backward for micro-batch {index}",
                'with nonfinite="skip_microbatch" a micro-batch is kept or left out as a whole',
                "add its losses and call backward once",
            )
        )
    # With a finite loss an infinite gradient is the scaler's overflow: it must reach the scaler.
    losses = window._losses
    if plan.step.scaling:
        finite = losses.finite(index)
    else:  # a loss on a device is looked at along with the gradient: the host waits once
        finite = place.isolated_is_finite(losses.on_device(index)) and losses.finite(index, on_host=True)
    if finite:
        place.keep()
        return
    place.drop()
    window._dropped.append(index)
    window._state_before.restore()
    if isinstance(plan.norms, Pooled):
        plan.norms.forget_microbatch()
