"""Dropping of micro-batches that are not finite, with their weights."""

from __future__ import annotations

from superbatch.errors import WindowError

from .participants.buffer_gradients import BufferGradientSum
from .transaction import Transaction


def keep_or_drop(window: Transaction, index: int, *, again: bool) -> None:
    """Add the gradient of the last micro-batch to the sum if it is finite; else drop the micro-batch.

    Args:
        window: transaction of a window with ``nonfinite="skip_microbatch"``.
        index: index of the micro-batch.
        again: whether it had a backward before, which raises `WindowError`.
    """
    gradients, progress = window.gradients, window.progress
    assert isinstance(gradients, BufferGradientSum)
    # The gradient of the first backward is already in the sum.
    if again:
        raise WindowError(
            f'Micro-batch {index} had a second backward, but nonfinite="skip_microbatch" keeps or '
            "drops a micro-batch as a whole. Add its losses and call backward once."
        )
    # With a scaler an infinite gradient is an overflow: it stays in the sum, so that the scale is lowered.
    losses = progress.losses
    if window.config.rule.scaling:
        finite = losses.finite(index)
    else:  # loss and gradient are checked together, so that the host waits for the device once
        finite = gradients.isolated_is_finite(losses.on_device(index)) and losses.finite(index, on_host=True)
    if finite:
        gradients.keep()
        return
    window.drop()
    progress.dropped.append(index)
