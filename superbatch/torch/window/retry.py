"""Out of memory inside a window: go on in smaller pieces, to the same update.

A micro-batch that failed must leave nothing behind. What it leaves is looked at:

* nothing had reached the gradients, and random state and buffers are as at its start (or can be put back):
  the window goes on from it, in smaller pieces;
* otherwise - a backward broke half way, and half of its gradient is in the sum; a buffer was written - the
  window begins again, everything as before it. A copy of all gradients for each micro-batch would avoid that,
  and take the memory that is missing.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from superbatch.errors import OutOfMemoryError, SplitError, explain

from ..memory.out_of_memory import out_of_memory, release_caches
from .microbatches import cut_large
from .participants.batchnorm import Pooled

if TYPE_CHECKING:
    from .open_window import WindowInFlight


def work_through(window: WindowInFlight, one: Callable[[Any], None]) -> None:
    """Run all micro-batches of a window, in smaller pieces where memory runs out.

    Args:
        window: open.
        one: the forward and backward of a micro-batch.

    Raises:
        OutOfMemoryError: a single sample does not fit, or micro-batches cannot be cut smaller.
    """
    while (failure := _until_failure(window, one)) is not None:
        _go_on_smaller(window, failure)


def mark(window: WindowInFlight, index: int) -> None:
    """Note what a micro-batch can change, before it begins.

    Args:
        window: open.
        index: of the micro-batch.
    """
    plan = window._plan
    window._place.savepoint()
    window._inputs[index] = _versions(window._pieces.microbatches[index])
    if plan.nonfinite == "skip_microbatch":
        window._state_before = plan.state.twin()
        window._state_before.take()
    plan.random.mark()


def _versions(part: Any) -> list[int]:
    """How often each tensor was written in place; it counts for all tensors that share memory."""
    kind = type(part)
    if kind is tuple or kind is dict:  # mostly of tensors alone, for which this takes a tenth of the time
        try:
            return list(map(_version, part.values() if kind is dict else part))
        except (AttributeError, RuntimeError):
            pass
    if isinstance(part, Tensor):
        return [] if part.is_inference() else [part._version]
    parts: Iterable[Any] = ()
    if isinstance(part, Mapping):
        parts = part.values()
    elif is_dataclass(part):
        parts = [getattr(part, field.name) for field in fields(part)]
    elif isinstance(part, tuple) or (isinstance(part, list) and part and not isinstance(part[0], _SCALAR)):
        parts = part
    return [version for inner in parts for version in _versions(inner)]


_SCALAR = (str, int, float)  # a list of them, one for each sample, may be long
_version = attrgetter("_version")


def _until_failure(window: WindowInFlight, one: Callable[[Any], None]) -> str | None:
    """Return the text of the error if memory ran out, None at the end of the window."""
    try:
        for microbatch in window:
            one(microbatch)
    except BaseException as error:
        if not out_of_memory(error):
            raise
        # The frames below this one hold the outputs and the micro-batch: memory is free only without them.
        traceback.clear_frames(error.__traceback__)
        return str(error) or type(error).__name__
    return None


def _go_on_smaller(window: WindowInFlight, failure: str) -> None:
    plan, pieces = window._plan, window._pieces
    index = window._next if window._current is None else window._current
    window._end_iteration()
    plan.transfer.forget()
    gc.collect()  # an exception and its frames may be a cycle
    release_caches(*plan.random.devices)
    samples = None if pieces.samples is None else pieces.samples[index]
    most = 0 if samples is None or isinstance(plan.norms, Pooled) else window._sizing.failed(samples)
    if not most:
        _give_up(window, index, samples, failure)
    again = not _put_back(window, index)
    _require_inputs(window, 0 if again else index, index, failure)
    if again:
        require_restorable(window, f"micro-batch {index}, for which there was no memory ({failure})")
        begin_again(window)
    try:
        cut_large(pieces, window._next, most)
    except SplitError as error:
        raise OutOfMemoryError(
            explain(f"micro-batch {index}, for which there was no memory ({failure})", str(error), _DO)
        ) from None
    window._inputs.pop(index, None)
    window._weights.weigh_again(pieces.microbatches, pieces.samples)
    window._failures += 1
    plan.reserve.tight = True
    warnings.warn(
        f"memory ran out in micro-batch {index} ({samples} samples); the window "
        f"{'begins again' if again else 'goes on'} in micro-batches of at most {most}. The update is the "
        f"same{'' if plan.sample_rng else _BUT_RANDOM}{but_unseen(window)}. ({failure.splitlines()[0]})",
        UserWarning,
        stacklevel=4,
    )


def unchanged(window: WindowInFlight) -> bool:
    """Whether no micro-batch was changed in place since it was handed out."""
    microbatches = window._pieces.microbatches
    return all(versions == _versions(microbatches[index]) for index, versions in window._inputs.items())


def _require_inputs(window: WindowInFlight, first: int, last: int, failure: str) -> None:
    """Check that micro-batches that are to be run again are as they were at their start."""
    for index in range(first, last + 1):
        versions = window._inputs.get(index)  # none of one without weight, which was not run
        if versions is not None and versions != _versions(window._pieces.microbatches[index]):
            raise OutOfMemoryError(
                explain(
                    f"micro-batch {last}, for which there was no memory ({failure})",
                    f"micro-batch {index} was changed in place since it was handed out, so that to run it "
                    "again would be another update; parameters and state are as before the window",
                    "let the loss function change a copy of its micro-batch, or make it smaller",
                )
            )


def require_restorable(window: WindowInFlight, failed: str) -> None:
    """Check that all state that the window has moved can be restored, before it begins again.

    Args:
        window: open.
        failed: the text of what there was no memory for.

    Raises:
        OutOfMemoryError: state has moved that was not copied.
    """
    lost = window._plan.state.lost()
    if lost:
        others = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise OutOfMemoryError(
            explain(
                failed,
                f"the window cannot begin again: it has moved the state {lost[0]!r}{others} for the first "
                "time, which was not copied and cannot be restored. Nothing was updated, everything else is "
                "as before the window",
                "restore that state, as from a checkpoint, and call again: from now on it is copied",
            )
        )


def but_unseen(window: WindowInFlight) -> str:
    """Return what the text of a window that goes on has to leave open."""
    unseen = window._plan.state.unseen()
    return (
        f", unless loss_fn writes to {unseen[0]!r} through .data or NumPy, which is not seen"
        if unseen
        else ""
    )


_BUT_RANDOM = (
    ", apart from random numbers that the loss draws: they depend on the split without sample_rng=True"
)
_DO = "make the samples smaller, use gradient checkpointing or a lower precision, or free memory"


def _give_up(window: WindowInFlight, index: int, samples: int | None, failure: str) -> NoReturn:
    if isinstance(window._plan.norms, Pooled):
        wrong = 'with batchnorm="per_microbatch" smaller pieces would be another update'
        do = "state a smaller microbatch_size"
    elif samples is None:
        wrong, do = "its samples cannot be counted, so it cannot be cut smaller", "give smaller micro-batches"
    else:
        wrong, do = "a single sample is the smallest micro-batch there is", _DO
    held = _bytes_of_state(window)
    raise OutOfMemoryError(
        explain(
            f"micro-batch {index} of {'some' if samples is None else samples} samples, for which there was "
            f"no memory ({failure}) beside {held / 2**20:.1f} MiB of parameters and their gradients",
            f"{wrong}; nothing was updated, everything is as before the window",
            do,
        )
    )


def _bytes_of_state(window: WindowInFlight) -> int:
    owned = window._plan.owned
    gradients = [entry.parameter.grad for entry in owned if entry.parameter.grad is not None]
    dense = [
        part
        for each in [*(entry.parameter for entry in owned), *gradients]
        for part in ((each._indices(), each._values()) if each.is_sparse else (each,))
    ]
    return sum(tensor.nbytes for tensor in dense)


def _put_back(window: WindowInFlight, index: int) -> bool:
    """Put everything back as it was before the failed micro-batch; whether that was possible."""
    plan = window._plan
    if window._summed or not window._place.rollback():
        return False
    if plan.nonfinite == "skip_microbatch":
        window._state_before.restore()
    elif plan.state.changed():
        return False
    if not plan.random.back_to_mark():
        return False
    window._weights.returned.pop(index, None)
    window._broken = None
    return True


def begin_again(window: WindowInFlight) -> None:
    """Restore everything as it was when the window was opened, and stay open.

    Args:
        window: open.
    """
    plan = window._plan
    window._place.discard()
    plan.state.restore()
    plan.random.restore()
    if plan.sample_rng:
        torch.set_rng_state(window._after_key)
    window._losses, window._dropped = window._losses.empty(), []
    window._next, window._broken = 0, None
    window._inputs.clear()
    window._weights.returned.clear()
    if window._noise is not None:
        window._noise.restart()
    window._place.open()


def restore_each(*steps: Callable[[], None] | None) -> None:
    """Take each step in turn, also after one that failed; one that ran out of memory is taken once more.

    Args:
        steps: each restores something, and may be taken twice; None is left out.

    Raises:
        BaseException: that of the last step that failed.

    Examples:
        >>> done = []
        >>> restore_each(lambda: done.append(1), None, lambda: done.append(2))
        >>> done
        [1, 2]
    """
    with ExitStack() as stack:  # which takes the step that was put in last first
        for step in reversed(steps):
            if step is not None:
                stack.callback(_restore, step)


def _restore(step: Callable[[], None]) -> None:
    try:
        step()
    except BaseException as error:
        if not out_of_memory(error):
            raise
        release_caches()
        step()


def shrink(window: WindowInFlight) -> None:
    """Let the next window have smaller micro-batches: one of a loop that cannot be gone on with ran out.

    Args:
        window: whose ``with`` block the error has left.
    """
    samples = window._pieces.samples
    if isinstance(window._plan.norms, Pooled):  # smaller ones would be another update
        return
    if window._current is not None and samples is not None:
        window._sizing.failed(samples[window._current])
