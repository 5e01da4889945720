"""Retry after out-of-memory: the window continues in smaller micro-batches, to the same update.

A micro-batch that failed must leave no changes behind:

* If no gradient has arrived, and random state and buffers are unchanged or can be restored, the window
  continues at this micro-batch, in smaller ones.
* Otherwise (part of a gradient is in the sum, or a buffer was written) the window restores the state before
  it and begins again. A copy of all gradients before each micro-batch would avoid this, but
  would take the memory that is missing.
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
    """Run `loss_fn` on all micro-batches of a window, in smaller ones if memory runs out.

    Raises:
        OutOfMemoryError: a single sample does not fit, or micro-batches cannot be cut smaller.
    """
    run_microbatch = backward_of(window)
    while (failure := _until_failure(window, run_microbatch)) is not None:
        progress = window.transaction.progress
        index = progress.next if progress.current is None else progress.current
        # The iterator refers to the micro-batch that failed, which must be freed.
        window.end_iteration()
        # A failed forward may have left autocast or grad mode changed.
        window.transaction.modes.restore()
        _continue_smaller(window.transaction, index, failure)


def backward_of(window: OpenWindow) -> Callable[[Any], None]:
    """Return a function that runs forward and backward of a micro-batch."""
    config = window.transaction.config
    loss_fn, read = config.loss_fn, config.declared.arguments
    assert loss_fn is not None
    # Decided once per window, not in each micro-batch.
    if config.declared.weigh == "returned" or config.declared.terms:
        return lambda microbatch: window.backward(*read(loss_fn(microbatch)))
    return lambda microbatch: window.backward(alone(loss_fn(microbatch)))


def _until_failure(window: OpenWindow, run_microbatch: Callable[[Any], None]) -> str | None:
    """Run the micro-batches; return the text of the error if memory ran out, None if all have run."""
    try:
        for microbatch in window:
            run_microbatch(microbatch)
    except BaseException as error:
        # Smaller micro-batches help only if memory ran out.
        if not out_of_memory(error):
            raise
        # The frames of the traceback hold the micro-batch and its activations.
        traceback.clear_frames(error.__traceback__)
        return str(error) or type(error).__name__
    return None


def _continue_smaller(window: Transaction, index: int, failure: str) -> None:
    """Cut smaller micro-batches, then roll back to the one that failed, or restart the window."""
    config, progress = window.config, window.progress
    microbatches = progress.microbatches
    if config.transfer is not None:
        # Frees the next micro-batch, which may already be on the device.
        config.transfer.forget()
    gc.collect()  # an exception and its frames may be a cycle
    release_caches(*config.random.devices)
    # None if samples cannot be counted, so that the micro-batch cannot be cut.
    samples = None if microbatches.samples is None else microbatches.samples[index]
    most = 0 if samples is None or window.pooled is not None else window.sizing.failed(samples)
    if not most:
        give_up(window, index, samples, failure)
    # rollback() returns False if a gradient has arrived, or if changed state has no copy.
    restarts = not window.rollback()
    # A micro-batch that runs again must not have been changed in place.
    require_inputs(progress, 0 if restarts else index, index, failure)
    if restarts:
        require_restorable(window, f"running out of memory in micro-batch {index} ({failure})")
        window.restart()
    try:
        cut_large(microbatches, progress.next, most)
    except SplitError as error:
        raise OutOfMemoryError(
            f"Memory ran out in micro-batch {index} ({failure}), which cannot be cut into smaller ones: "
            f"{error}"
        ) from None
    # The recorded versions are those of the larger micro-batch.
    progress.remove_versions(index)
    # Each new micro-batch needs a weight of its own.
    progress.weigh_again()
    progress.failures += 1
    # From now on each update checks that there is memory for the step of the optimizers.
    config.reserve.tight = True
    warn(
        f"memory ran out in micro-batch {index} ({samples} samples); the window "
        f"{'begins again' if restarts else 'continues'} in micro-batches of at most {most} samples. The "
        f"update is the same{'' if config.sample_rng else _BUT_RANDOM}{retry_condition(window)}. "
        f"({failure.splitlines()[0]})"
    )


def require_inputs(progress: Progress, first: int, last: int, failure: str) -> None:
    """Check that micro-batches to run again were not changed in place.

    Args:
        progress: position in the window.
        first: index of the first of them.
        last: index of the last of them, which ran out of memory.
        failure: text of that error.

    Raises:
        OutOfMemoryError: one was changed.
    """
    index = progress.written(first, last)
    if index is not None:
        raise OutOfMemoryError(
            f"Memory ran out in micro-batch {last} ({failure}), and the window cannot be run again, because "
            f"loss_fn has changed micro-batch {index} in place; parameters and state are as before the "
            "window. Copy the tensors of the micro-batch in loss_fn before changing them, or pass a smaller "
            "microbatch_size."
        )


def require_restorable(window: Transaction, failed: str) -> None:
    """Check that all state that the window has changed can be restored, before it begins again.

    Args:
        window: transaction of the open window.
        failed: text that names the failure.

    Raises:
        OutOfMemoryError: there is no copy of a state that has changed.
    """
    # State is copied before a window only if an earlier window has changed it.
    lost = window.config.state.unrestorable()
    if lost:
        others = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise OutOfMemoryError(
            f"The window cannot begin again after {failed}, because it has changed the state "
            f"{lost[0]!r}{others} for the first time, and there is no copy to restore; no update was made, "
            "and everything else is as before the window. Load that state, for example from a checkpoint, "
            "and call again: from now on it is copied."
        )


def retry_condition(window: Transaction) -> str:
    """Return the condition under which a retried update differs, as the end of a sentence; "" if none."""
    state = window.config.state
    changed, undetectable = state.possibly_changed(), state.undetectable()
    # First, because this state differs for certain; the other differs only if loss_fn wrote to it.
    if changed:
        return (
            f", unless loss_fn itself has changed {changed[0]!r} since this window began, which cannot be "
            "restored"
        )
    return (
        f", unless loss_fn writes to {undetectable[0]!r} through .data or NumPy, which cannot be detected"
        if undetectable
        else ""
    )


_BUT_RANDOM = ", except that random numbers of the loss depend on the split without PerSampleRandom"
_DO = "Make the samples smaller, use gradient checkpointing or a lower precision, or free memory"


def give_up(window: Transaction, index: int, samples: int | None, failure: str) -> NoReturn:
    """Raise `OutOfMemoryError` for a micro-batch that does not fit and cannot be cut.

    Args:
        window: transaction of the open window.
        index: index of the micro-batch.
        samples: number of its samples; None if they cannot be counted.
        failure: text of the allocator's error.
    """
    # Only the first reason that applies names a remedy that helps.
    # A GhostBatchNorm normalises over the micro-batch, so its size must not change.
    if window.pooled is not None:
        wrong = "with GhostBatchNorm the update would change in smaller micro-batches"
        do = "Pass a smaller microbatch_size"
    elif samples is None:
        wrong = "the micro-batch cannot be cut, because its samples cannot be counted"
        do = "Pass smaller micro-batches"
    else:
        wrong, do = "a micro-batch of one sample cannot be cut", _DO
    held = _bytes_of_state(window)
    size = "" if samples is None else f" of {samples} sample{'s' * (samples > 1)}"
    raise OutOfMemoryError(
        f"Memory ran out in micro-batch {index}{size} ({failure}) beside {held / 2**20:.1f} MiB of "
        f"parameters and gradients, and {wrong}; no update was made, and everything is as before the "
        f"window. {do}."
    )


def _bytes_of_state(window: Transaction) -> int:
    owned = window.config.owned
    gradients = [entry.parameter.grad for entry in owned if entry.parameter.grad is not None]
    # The indices of a sparse gradient take little memory and are left out.
    return sum(values(each).nbytes for each in [*(entry.parameter for entry in owned), *gradients])


def shrink(window: Transaction) -> None:
    """Make the micro-batches of the next window smaller, after the user's own loop ran out of memory.

    Args:
        window: transaction of the window whose ``with`` block the error has left.
    """
    progress = window.progress
    samples = progress.microbatches.samples
    if window.pooled is not None:  # smaller micro-batches would change the update
        return
    if progress.current is not None and samples is not None:
        window.sizing.failed(samples[progress.current])
