"""Finding out what was not finite in a window that is about to be given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..memory.out_of_memory import out_of_memory
from .nonfinite import Culprit, first_bad_microbatch, first_bad_parameter
from .participants.gradient_sum import run_backward
from .participants.momentum_gradients import InMomentum
from .transfer import to_device

if TYPE_CHECKING:
    from .open_window import WindowInFlight


def by_loss(window: WindowInFlight, losses: Any, bad: list[int]) -> Culprit:
    """Return the first of the micro-batches `bad`, whose losses are not finite; there may be none here."""
    droppable = _can_drop(window)
    if not bad:
        return Culprit(droppable=droppable)
    place = window._place
    sums = place.sums() if isinstance(place, InMomentum) else place.close()
    parameter = first_bad_parameter(window._plan.owned, sums)
    loss, term = window._weights.loss_of(losses, bad[0])
    return Culprit(bad[0], loss, parameter, whole=window._plan.whole, term=term, droppable=droppable)


def by_gradient(window: WindowInFlight, losses: Any, gradients: list[Tensor | None]) -> Culprit:
    """Return the first micro-batch with a gradient that is not finite, by running them once more."""
    plan = window._plan
    parameter = first_bad_parameter(plan.owned, gradients)
    if plan.whole:  # there is but one
        return Culprit(0, losses[0], parameter, whole=True)
    if plan.loss_fn is None:  # an owned loop cannot be run again
        return Culprit(parameter=parameter, droppable=_can_drop(window))
    plan.random.restore()
    plan.state.restore()
    took_part = window._weights.took_part(window._dropped)
    terms: list[str] = []
    try:
        index = first_bad_microbatch(
            took_part, lambda index: _backward_again(window, index, terms), plan.owned
        )
    except BaseException as error:
        if not out_of_memory(error):
            raise
        index = None  # the sums are in memory beside this: without the index, the error is what it is
    loss = None if index is None else window._weights.loss_of(losses, index)[0]
    term = terms[0] if terms else ""
    return Culprit(index, loss, parameter, term=term, droppable=_can_drop(window))


def _can_drop(window: WindowInFlight) -> bool:
    """Tell whether nonfinite="skip_microbatch" is possible with the other options."""
    return window._plan.declared.can_drop and not isinstance(window._place, InMomentum)


def _backward_again(window: WindowInFlight, index: int, terms: list[str]) -> None:
    """Compute the gradient of a micro-batch; add the terms whose gradients are not finite."""
    plan = window._plan
    assert plan.loss_fn is not None
    with window._stream(index):
        microbatch = to_device(window._pieces.microbatches[index], plan.device)
        loss = plan.declared.arguments(plan.loss_fn(microbatch))[0]
        parts = window._weights.by_name(index, loss)
        for number, (name, part) in enumerate(parts.items(), 1):
            run_backward(part, None, window._place.inputs, retain_graph=number < len(parts))
            if name and first_bad_parameter(plan.owned, [entry.parameter.grad for entry in plan.owned]):
                terms.append(name)
