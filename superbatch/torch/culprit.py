"""Finding out what was not finite in a window that is about to be given up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .gradients import run_backward
from .in_momentum import InMomentum
from .nonfinite import Culprit, first_bad_microbatch, first_bad_parameter
from .out_of_memory import out_of_memory
from .transfer import to_device

if TYPE_CHECKING:
    from .in_flight import WindowInFlight


def by_loss(window: WindowInFlight, losses: list[float], bad: list[int]) -> Culprit:
    """Return the first of the micro-batches `bad`, whose losses are not finite; there may be none here."""
    if not bad:
        return Culprit()
    place = window._place
    sums = place.sums() if isinstance(place, InMomentum) else place.close()
    parameter = first_bad_parameter(window._plan.owned, sums)
    return Culprit(bad[0], losses[bad[0]], parameter, whole=window._plan.whole)


def by_gradient(window: WindowInFlight, losses: list[float], gradients: list[Tensor | None]) -> Culprit:
    """Return the first micro-batch with a gradient that is not finite, by running them once more."""
    plan = window._plan
    parameter = first_bad_parameter(plan.owned, gradients)
    if plan.whole:  # there is but one
        return Culprit(0, losses[0], parameter, whole=True)
    if plan.loss_fn is None:  # an owned loop cannot be run again
        return Culprit(parameter=parameter)
    plan.random.restore()
    plan.buffers.restore()
    took_part = [index for index, weight in enumerate(window._weights.counted(window._dropped)) if weight]
    try:
        index = first_bad_microbatch(took_part, lambda index: _backward_again(window, index), plan.owned)
    except BaseException as error:
        if not out_of_memory(error):
            raise
        index = None  # the sums are in memory beside this: without the index, the error is what it is
    return Culprit(index, None if index is None else losses[index], parameter)


def _backward_again(window: WindowInFlight, index: int) -> None:
    plan = window._plan
    assert plan.loss_fn is not None
    with window._stream(index):
        loss = plan.loss_fn(to_device(window._pieces.microbatches[index], plan.device))
        loss = loss[0] if isinstance(loss, tuple) else loss
        run_backward(loss, None, window._place.inputs, retain_graph=False)
