"""Errors for a window that is used in the wrong order."""

from __future__ import annotations

from superbatch.errors import InputError, WindowError


def second_window() -> WindowError:
    """Return the error for a window beside an open one."""
    return WindowError(
        "A second window of one accumulator was opened while the first is open, and both would sum into the "
        "same gradients. Leave the first block, or use one Accumulator per optimizer; if an interrupt left "
        "it open, call discard()."
    )


def empty_window() -> InputError:
    """Return the error for a `Window` that has no micro-batches."""
    return InputError(
        "A Window without micro-batches makes no update. Pass one or more; where only this rank has no data, "
        "call accumulate(None)."
    )


def load_inside() -> WindowError:
    """Return the error for loading a state while a window is open."""
    return WindowError("load_state_dict() was called inside a window. Leave the window first.")


def over() -> WindowError:
    """Return the error for entering a window a second time."""
    return WindowError(
        "The window is over, and its micro-batches are freed. Call window(batch) for a new one."
    )


def gone_on_from() -> WindowError:
    """Return the error for a window whose saved state another window has resumed."""
    return WindowError(
        "A state was loaded, resumed or discarded after this window was made. Call window(batch) for a new "
        "one."
    )


def other_parameters() -> WindowError:
    """Return the error for a window that was made before parameters were changed in kind."""
    return WindowError(
        "Parameters were frozen, unfrozen, added or converted after this window was made. Call window(batch) "
        "again, and enter the new window."
    )


def while_busy(call: str) -> WindowError:
    """Return the error for a call by a hook, scheduler or participant while the window begins or ends."""
    return WindowError(
        f"{call} was called by a hook, a scheduler or a participant while the window was beginning or "
        "ending, where the update is half made. Call it after the window."
    )


def no_update() -> WindowError:
    """Return the error for the update of a window that was not left, or left by an error."""
    return WindowError(
        "This window has no update yet. Read window.update after the `with` block; a block that an error has "
        "left makes none."
    )


def not_open() -> WindowError:
    """Return the error for a loop over a window that was not entered."""
    return WindowError(
        "The window is not open, so there is nothing to loop over. Write the loop inside its `with` block."
    )


def outside_of_loop() -> WindowError:
    """Return the error for a loss that belongs to no micro-batch."""
    return WindowError(
        "backward(loss) was called outside of the loop over the window, so the loss belongs to no "
        "micro-batch. Call it inside `for microbatch in window:`."
    )


def after_failure(broken: int) -> WindowError:
    """Return the error for a backward after that of micro-batch `broken` has raised."""
    return WindowError(
        f"The backward of micro-batch {broken} failed, and what it added cannot be taken out of the sum. "
        "Leave the `with` block by its error, which restores everything, and make a new window."
    )


def without_backward(index: int) -> WindowError:
    """Return the error for a micro-batch that counts and has had no backward."""
    return WindowError(
        f"Micro-batch {index} had no window.backward(loss). Call it for each micro-batch, in place of "
        "loss.backward(); a micro-batch to leave out gets the weight 0."
    )
