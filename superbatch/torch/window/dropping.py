"""Leaving a micro-batch that is not finite out of the sum, its weight with it."""

from __future__ import annotations

from superbatch.errors import WindowError

from .participants.buffer_gradients import BufferGradientSum
from .transaction import Transaction


def keep_or_drop(window: Transaction, index: int, *, again: bool) -> None:
    """Add the gradient of the last micro-batch to the sum if it is finite; else leave the micro-batch out.

    Args:
        window: with ``nonfinite="skip_microbatch"``.
        index: of the micro-batch.
        again: whether it had a backward before.

    Raises:
        WindowError: it had.
    """
    gradients, progress = window.gradients, window.progress
    assert isinstance(gradients, BufferGradientSum)
    # After a second backward the first one's gradient is already in the sum.
    if again:
        raise WindowError(
            f'Micro-batch {index} had a second backward, and nonfinite="skip_microbatch" keeps or leaves out '
            "a micro-batch as a whole. Add its losses and call backward once."
        )
    # With a finite loss an infinite gradient is the scaler's overflow: it must reach the scaler.
    losses = progress.losses
    if window.config.rule.scaling:
        finite = losses.finite(index)
    else:  # a loss on a device is inspected along with the gradient: the host waits once
        finite = gradients.isolated_is_finite(losses.on_device(index)) and losses.finite(index, on_host=True)
    if finite:
        gradients.keep()
        return
    # Gradient, statistics and forward state; random numbers stay drawn.
    window.drop()
    progress.dropped.append(index)
