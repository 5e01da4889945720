"""Search for the micro-batch, loss and parameter that are not finite, before a window is discarded."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..memory.out_of_memory import out_of_memory
from .lockstep import bad_parameter, find_turn
from .nonfinite import Culprit, first_bad_microbatch, first_bad_parameter
from .participants.gradient_sum import run_backward
from .participants.momentum_gradients import MomentumGradientSum
from .transaction import Transaction
from .transfer import to_device


def by_loss(window: Transaction, losses: Any, bad: list[int]) -> Culprit:
    """Describe the first micro-batch of `bad`, the indices of losses that are not finite on this rank."""
    # The advice must not name an option that other options exclude.
    droppable = _can_drop(window)
    if not bad:
        return Culprit(droppable=droppable)
    gradients = window.gradients
    # close() of a momentum sum returns no tensors, because the momentum buffers are its sums.
    sums = gradients.sums() if isinstance(gradients, MomentumGradientSum) else gradients.close()
    parameter = first_bad_parameter(window.config.owned, sums)
    loss, term = window.progress.weights.loss_of(losses, bad[0])
    return Culprit(bad[0], loss, parameter, whole=window.config.whole, term=term, droppable=droppable)


def by_gradient(window: Transaction, losses: Any, gradients: list[Tensor | None]) -> Culprit:
    """Run the micro-batches once more, and describe the first whose gradient is not finite."""
    config = window.config
    collective = config.sync.has_collective_forwards
    if collective:
        parameter = bad_parameter(window, gradients)
    else:
        parameter = first_bad_parameter(config.owned, gradients)
    if config.whole:  # there is only one micro-batch
        return Culprit(0, losses[0], parameter, whole=True)
    if config.loss_fn is None:  # a loop of the user's own cannot be run again
        return Culprit(parameter=parameter, droppable=_can_drop(window))
    # Restore generators and buffers, so that the forwards give the same losses. `restart` keeps its copies,
    # because the window is restored once more.
    config.random.restart()
    config.state.restore()
    took_part = window.progress.weights.took_part(window.progress.dropped)
    terms: list[str] = []
    again = partial(_backward_again, window, terms=terms)
    try:
        if collective:
            index = find_turn(window, lambda index: again(index, counts=index in took_part))
        else:
            index = first_bad_microbatch(took_part, again, config.owned)
    except BaseException as error:
        if not out_of_memory(error):
            raise
        index = None  # this search needs more memory than the window; the error is raised without the index
    loss = None if index is None else window.progress.weights.loss_of(losses, index)[0]
    term = terms[0] if terms else ""
    return Culprit(index, loss, parameter, term=term, droppable=_can_drop(window), any_rank=collective)


def _can_drop(window: Transaction) -> bool:
    """Return whether nonfinite="skip_microbatch" is possible with the other options."""
    config = window.config
    momentum = isinstance(window.gradients, MomentumGradientSum)
    return config.declared.can_drop and not momentum and not config.sync.has_collective_forwards


def _backward_again(window: Transaction, index: int, terms: list[str], *, counts: bool = True) -> None:
    """Compute the gradient of a micro-batch, and append terms whose gradients are not finite to `terms`."""
    config = window.config
    assert config.loss_fn is not None
    index = max(0, min(index, len(window.progress.microbatches) - 1))  # extra turns of weight 0 have none
    with window.stream(index):
        microbatch = to_device(window.progress.microbatches.runs[index], config.device)
        loss = config.declared.arguments(config.loss_fn(microbatch))[0]
        parts = window.progress.weights.by_name(index, loss) if counts else {}
        # Other ranks wait for a backward in this turn.
        if not parts and config.sync.has_collective_forwards:
            config.sync.zero_backward(again=False)
        for number, (name, part) in enumerate(parts.items(), 1):
            run_backward(part, None, window.gradients.inputs, retain_graph=number < len(parts))
            # After each term, to find the term that adds the NaN.
            if name and first_bad_parameter(config.owned, [entry.parameter.grad for entry in config.owned]):
                terms.append(name)
