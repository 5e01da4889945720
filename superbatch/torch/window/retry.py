"""Retry after out-of-memory: the window continues in smaller micro-batches, to the same update.

A micro-batch that failed must leave nothing behind. What it leaves is inspected:

* nothing had reached the gradients, and random state and buffers are as at its start (or can be restored):
  the window continues from it, in smaller pieces;
* otherwise - a backward broke half way, and half of its gradient is in the sum; a buffer was written - the
  window begins again, everything as before it. A copy of all gradients for each micro-batch would avoid that,
  and take the memory that is missing.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

from superbatch.errors import OutOfMemoryError, SplitError

from ..loss.losses import alone
from ..memory.out_of_memory import out_of_memory, release_caches
from ..warn import warn
from .microbatches import cut_large
from .participants.gradient_sum import values
from .progress import Progress
from .transaction import Transaction


class OpenWindow(Protocol):
    """A window to iterate over."""

    transaction: Transaction

    def __iter__(self) -> Iterator[Any]: ...

    def backward(self, loss: Any, weight: Any = None) -> None:
        """Add the gradient of the current micro-batch's loss."""
        ...

    def end_iteration(self) -> None:
        """Close the iteration, so that it holds no micro-batch."""
        ...


def work_through(window: OpenWindow) -> None:
    """Run `loss_fn` on all micro-batches of a window, in smaller pieces where memory runs out.

    Args:
        window: open.

    Raises:
        OutOfMemoryError: a single sample does not fit, or micro-batches cannot be cut smaller.
    """
    one = backward_of(window)
    while (failure := _until_failure(window, one)) is not None:
        progress = window.transaction.progress
        index = progress.next if progress.current is None else progress.current
        # The iteration holds the micro-batch that failed.
        window.end_iteration()
        # A forward that failed inside autocast or no_grad() has not left it.
        window.transaction.modes.restore()
        _go_on_smaller(window.transaction, index, failure)


def backward_of(window: OpenWindow) -> Callable[[Any], None]:
    """Return the forward and backward of a micro-batch.

    Args:
        window: open.
    """
    config = window.transaction.config
    loss_fn, read = config.loss_fn, config.declared.arguments
    assert loss_fn is not None
    # One check for the window, not one in each micro-batch.
    if config.declared.weigh == "returned" or config.declared.terms:
        return lambda microbatch: window.backward(*read(loss_fn(microbatch)))
    return lambda microbatch: window.backward(alone(loss_fn(microbatch)))


def _until_failure(window: OpenWindow, one: Callable[[Any], None]) -> str | None:
    """Return the text of the error if memory ran out, None at the end of the window."""
    try:
        for microbatch in window:
            one(microbatch)
    except BaseException as error:
        # Only lack of memory can be cured by smaller pieces.
        if not out_of_memory(error):
            raise
        # The frames below this one hold the outputs and the micro-batch: memory is free only without them.
        traceback.clear_frames(error.__traceback__)
        return str(error) or type(error).__name__
    return None


def _go_on_smaller(window: Transaction, index: int, failure: str) -> None:
    config, progress = window.config, window.progress
    pieces = progress.microbatches
    if config.transfer is not None:
        # The next micro-batch may be on the device already.
        config.transfer.forget()
    gc.collect()  # an exception and its frames may be a cycle
    release_caches(*config.random.devices)
    # None for a batch whose samples cannot be counted: it cannot be cut.
    samples = None if pieces.samples is None else pieces.samples[index]
    most = 0 if samples is None or window.pooled is not None else window.sizing.failed(samples)
    if not most:
        give_up(window, index, samples, failure)
    # False: a gradient has arrived, or state has moved that has no copy.
    again = not window.rollback()
    # Whatever runs again must be as it was when it ran first.
    require_inputs(progress, 0 if again else index, index, failure)
    if again:
        require_restorable(window, f"micro-batch {index}, for which there was no memory ({failure})")
        window.restart()
    try:
        cut_large(pieces, progress.next, most)
    except SplitError as error:
        raise OutOfMemoryError(
            f"There was no memory for micro-batch {index} ({failure}), and it cannot be cut smaller. {error} "
            f"{_DO}."
        ) from None
    # Its versions are those of the larger piece.
    progress.hand_out_again(index)
    # The weights of the pieces add up to that of the micro-batch.
    progress.weigh_again()
    progress.failures += 1
    # From now on each update checks that there is memory for the step of the optimizers.
    config.reserve.tight = True
    warn(
        f"memory ran out in micro-batch {index} ({samples} samples); the window "
        f"{'begins again' if again else 'goes on'} in micro-batches of at most {most}. The update is the "
        f"same{'' if config.sample_rng else _BUT_RANDOM}{but_unseen(window)}. ({failure.splitlines()[0]})"
    )


def require_inputs(progress: Progress, first: int, last: int, failure: str) -> None:
    """Check that micro-batches that are to be run again are as they were at their start.

    Args:
        progress: of the window.
        first: of them.
        last: of them, for which there was no memory.
        failure: the text of its error.

    Raises:
        OutOfMemoryError: they are not.
    """
    index = progress.written(first, last)
    if index is not None:
        raise OutOfMemoryError(
            f"There was no memory for micro-batch {last} ({failure}), and micro-batch {index} was changed in "
            "place since it was handed out, so that to run it again would be another update. Parameters and "
            "state are as before the window. Let loss_fn change a copy of its micro-batch, or make the "
            "micro-batch smaller."
        )


def require_restorable(window: Transaction, failed: str) -> None:
    """Check that all state that the window has moved can be restored, before it begins again.

    Args:
        window: open.
        failed: the text of what there was no memory for.

    Raises:
        OutOfMemoryError: state has moved that was not copied.
    """
    # Lost state moved in this window for the first time, so there is no copy of it.
    lost = window.config.state.lost()
    if lost:
        others = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise OutOfMemoryError(
            f"The window cannot begin again after {failed}: it has moved the state {lost[0]!r}{others} for "
            "the first time, which was not copied and cannot be restored. Nothing was updated, everything "
            "else is as before the window. Restore that state, as from a checkpoint, and call again: from "
            "now on it is copied."
        )


def but_unseen(window: Transaction) -> str:
    """Return the reservation that the warning of a window that continues has to make."""
    # `unsure` first: it was seen to differ, where `unseen` only may.
    unsure, unseen = window.config.state.unsure(), window.config.state.unseen()
    if unsure:
        return (
            f", unless loss_fn has changed {unsure[0]!r} in this window for the first time: it is not what "
            "it was when all state was looked at"
        )
    return (
        f", unless loss_fn writes to {unseen[0]!r} through .data or NumPy, which is not seen"
        if unseen
        else ""
    )


_BUT_RANDOM = (
    ", apart from random numbers that the loss draws: they depend on the split without PerSampleRandom"
)
_DO = "Make the samples smaller, use gradient checkpointing or a lower precision, or free memory"


def give_up(window: Transaction, index: int, samples: int | None, failure: str) -> NoReturn:
    """Raise the error for a micro-batch that does not fit and cannot be cut.

    Args:
        window: open.
        index: of the micro-batch.
        samples: of it; None where they cannot be counted.
        failure: the text of the error of the allocator.

    Raises:
        OutOfMemoryError: always.
    """
    # In this order: the first reason that holds is the one to act on.
    if window.pooled is not None:
        wrong = "with GhostBatchNorm smaller pieces would be another update"
        do = "State a smaller microbatch_size"
    elif samples is None:
        wrong, do = "its samples cannot be counted, so it cannot be cut smaller", "Give smaller micro-batches"
    else:
        wrong, do = "a single sample is the smallest micro-batch there is", _DO
    held = _bytes_of_state(window)
    raise OutOfMemoryError(
        f"There was no memory for micro-batch {index} of {'some' if samples is None else samples} samples "
        f"({failure}) beside {held / 2**20:.1f} MiB of parameters and their gradients, and {wrong}; nothing "
        f"was updated, everything is as before the window. {do}."
    )


def _bytes_of_state(window: Transaction) -> int:
    owned = window.config.owned
    gradients = [entry.parameter.grad for entry in owned if entry.parameter.grad is not None]
    # Of a sparse gradient the indices are left out: they are few.
    return sum(values(each).nbytes for each in [*(entry.parameter for entry in owned), *gradients])


def shrink(window: Transaction) -> None:
    """Let the next window have smaller micro-batches: one of a loop that cannot continue ran out.

    Args:
        window: whose ``with`` block the error has left.
    """
    progress = window.progress
    samples = progress.microbatches.samples
    if window.pooled is not None:  # smaller ones would be another update
        return
    if progress.current is not None and samples is not None:
        window.sizing.failed(samples[progress.current])
