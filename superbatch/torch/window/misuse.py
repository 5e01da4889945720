"""Errors for a window that is used in the wrong order."""

from __future__ import annotations

from superbatch.errors import InputError, WindowError


def second_window() -> WindowError:
    """Return the error for opening a window while another one is open."""
    return WindowError(
        "Another window of this accumulator is open, and both would sum into the same gradients. Leave the "
        "first `with` block, use one Accumulator per optimizer, or, if an interrupt left the first window "
        "open, call discard()."
    )


def empty_window() -> InputError:
    """Return the error for a `Window` that has no micro-batches."""
    return InputError(
        "The Window contains no micro-batches. Pass a Window with at least one, or call accumulate(None) if "
        "only this rank has no data."
    )


def load_inside() -> WindowError:
    """Return the error for loading a state while a window is open."""
    return WindowError("load_state_dict() was called inside a window. Leave the window first.")


def over() -> WindowError:
    """Return the error for entering a window a second time."""
    return WindowError(
        "This window is over, and its micro-batches are freed. Call window(batch) for a new one."
    )


def made_before_load() -> WindowError:
    """Return the error for a window made before a state was loaded, resumed or discarded."""
    return WindowError(
        "A state was loaded, resumed or discarded after this window was made. Call window(batch) for a new "
        "one."
    )


def other_parameters() -> WindowError:
    """Return the error for a window made before parameters were frozen, added or converted."""
    return WindowError(
        "Parameters were frozen, unfrozen, added or converted after this window was made. Call window(batch) "
        "again, and enter the new window."
    )


def while_busy(call: str) -> WindowError:
    """Return the error for a call by a hook, scheduler or participant while the window begins or ends."""
    return WindowError(
        f"{call} was called by a hook, a scheduler or a participant while the window was beginning or "
        "ending, when the update is incomplete. Call it after the window."
    )


def no_update() -> WindowError:
    """Return the error for reading the update inside the block, or after an update that raised."""
    return WindowError(
        "This window has no update, because its block has not ended or has raised. Use window.update only "
        "after a `with` block that ends without an error."
    )


def not_open() -> WindowError:
    """Return the error for a loop outside of the window's block."""
    return WindowError(
        "The window is not open, so it cannot be iterated over. Write the loop inside its `with` block."
    )


def outside_of_loop() -> WindowError:
    """Return the error for a backward outside of the loop over micro-batches."""
    return WindowError(
        "backward(loss) was called outside of the loop over the window, so it is unknown which micro-batch "
        "the loss belongs to. Call it inside `for microbatch in window:`."
    )


def after_failure(broken: int) -> WindowError:
    """Return the error for a backward after the backward of micro-batch `broken` has raised."""
    return WindowError(
        f"The backward of micro-batch {broken} failed, and the part that it added cannot be removed from the "
        "sum. Leave the `with` block by that error, which restores everything, and make a new window."
    )


def without_backward(index: int) -> WindowError:
    """Return the error for a micro-batch without a backward."""
    return WindowError(
        f"window.backward(loss) was not called for micro-batch {index}. Call it for each micro-batch, in "
        "place of loss.backward(), or give a micro-batch that is left out the weight 0."
    )
