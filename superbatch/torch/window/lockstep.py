"""Windows of ranks whose forwards and backwards are collective, as those of sharded models are.

These ranks have `Sync.has_collective_forwards`. A *turn* is one forward and backward, which all ranks run
together, so every rank runs the same number of turns. A rank that fails takes part in the remaining turns
with one sample each (`Sync.catch_up`). After the last turn the ranks vote. If memory ran out on one, all
ranks begin the window again in smaller micro-batches; after any other error all ranks leave the window.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.batch.tree import plan as plan_of
from superbatch.errors import OutOfMemoryError, RankError, SplitError

from ..memory.out_of_memory import out_of_memory, release_caches
from ..warn import warn
from .microbatches import cut_large
from .nonfinite import first_bad_parameter
from .participants.gradient_sum import all_finite, clear
from .progress import Progress
from .retry import OpenWindow, backward_of, give_up, require_inputs, require_restorable
from .sync.faults import is_transport
from .sync.sync import Sync
from .transaction import Transaction
from .transfer import to_device
from .turns import cut_to_equal_turns

_MOST_TRIED = 4  # micro-batches that a failed rank tries to run a forward of


def work_in_lockstep(window: OpenWindow) -> None:
    """Run `loss_fn` on all micro-batches of a window; every rank runs the same number of turns.

    Raises:
        OutOfMemoryError: a single sample does not fit on some rank, or micro-batches cannot be cut smaller.
        RankError: another rank has failed.
    """
    run_microbatch = backward_of(window)
    while (failure := _until_failure(window, run_microbatch)) is not None:
        progress = window.transaction.progress
        index = progress.next if progress.current is None else progress.current
        index = max(0, min(index, len(progress.microbatches) - 1))  # extra turns have no micro-batch
        window.end_iteration()
        window.transaction.modes.restore()
        _begin_again(window.transaction, index, failure)


def with_backward(parts: list[tuple[Tensor, float]], sync: Sync) -> list[tuple[Tensor, float]]:
    """Return the losses of a micro-batch to run backward on, each with its factor.

    If backwards are collective, this function runs a backward of zeros for each loss that is left out.

    Args:
        parts: losses with their factors; empty if the micro-batch has no weight.
        sync: the ranks.

    Examples:
        >>> from .sync.local import Local
        >>> with_backward([(torch.ones(()), 0.5), (torch.tensor(torch.nan), 0.0)], Local())
        [(tensor(1.), 0.5)]
    """
    # The mean of a micro-batch of weight 0 may be NaN, and 0 x NaN is NaN.
    run = [each for each in parts if each[1] or (sync.has_collective_forwards and bool(each[0].isfinite()))]
    if sync.has_collective_forwards:
        missing = max(1, len(parts)) - len(run)
        # Every rank must run the same number of backwards.
        for number in range(1, missing + 1):
            sync.zero_backward(again=bool(run) or number < missing)
    return run


class Failure(NamedTuple):
    """Out of memory: the text of the error, and whether this rank raised it."""

    text: str
    here: bool


def _until_failure(window: OpenWindow, run_microbatch: Callable[[Any], None]) -> Failure | None:
    """Run all turns; return the failure if memory ran out on any rank, else None.

    Raises:
        BaseException: another error of this rank; the caller must `catch_up` before it leaves the window.
        RankError: another rank has failed.
    """
    transaction = window.transaction
    failure: Failure | None = None
    try:
        for microbatch in window:
            run_microbatch(microbatch)
            microbatch = None  # this reference would keep the last micro-batch alive after the loop
    except BaseException as error:
        if not out_of_memory(error):
            raise
        # clear_frames() skips this frame, because it is still running.
        microbatch = None
        catch_up(transaction, error)
        traceback.clear_frames(error.__traceback__)
        failure = Failure(str(error) or type(error).__name__, here=True)
    # After the last turn, because until then the ranks may wait inside collectives.
    (memory,) = transaction.config.sync.sum_numbers([failure is not None])
    return failure or (Failure("on another rank", here=False) if memory else None)


def catch_up(window: Transaction, error: BaseException | None) -> None:
    """Take part in the remaining turns of a window after this rank has failed, so that no other rank waits.

    Args:
        window: the window; afterwards it is left or begins again.
        error: the error of this rank; None: it leaves the window without an error.
    """
    config, progress = window.config, window.progress
    # After a RankError or a broken connection no rank waits.
    others_left = isinstance(error, RankError) or is_transport(error)
    if not progress.others_may_wait or config.loss_fn is None or others_left:
        return
    progress.others_may_wait = False
    if error is not None and out_of_memory(error):
        traceback.clear_frames(error.__traceback__)
        gc.collect()  # an exception and its frames may be a cycle
        release_caches(*config.random.devices)
    left = len(progress.microbatches) + progress.microbatches.extra_turns - progress.turns
    # A rank that failed before its first turn has not entered no_sync() for it, as the other ranks have.
    if not progress.turns:
        window.renew_sync()
        config.sync.begin_microbatch(last=left == 1, zero_weight=True)
        left -= 1
    first = progress.next if progress.current is None else progress.current
    # Several candidates, because one may fail for the same reason as the window did.
    forwards = [partial(_forward_of_sample, window, index) for index in _candidates(first, progress)]
    while config.sync.catch_up(forwards) and left:
        config.sync.begin_microbatch(last=left == 1, zero_weight=True)
        left -= 1


def _candidates(first: int, progress: Progress) -> list[int]:
    """Return the indices of a few micro-batches, beginning with `first`, the one that failed."""
    count = len(progress.microbatches.runs)
    # The failed one first, because its forward has already reached some of the collectives.
    return list(dict.fromkeys([min(first, count - 1), *range(count)]))[:_MOST_TRIED]


def _forward_of_sample(window: Transaction, index: int) -> Tensor:
    """Run the loss on the first sample of a micro-batch, or on all samples if it cannot be cut."""
    config, microbatches = window.config, window.progress.microbatches
    assert config.loss_fn is not None
    sample = microbatches.runs[index]
    with suppress(SplitError):
        sample = plan_of(sample, **microbatches.paths).take(0, 1)
    loss = config.declared.arguments(config.loss_fn(to_device(sample, config.device)))[0]
    return torch.stack(list(loss.values())).sum() if isinstance(loss, Mapping) else loss


def _begin_again(window: Transaction, index: int, failure: Failure) -> None:
    """Restart the window in smaller micro-batches; every rank gets the same number of turns.

    Args:
        window: the transaction of the window.
        index: the micro-batch at which this rank stopped.
        failure: how memory ran out, on this rank or on another one.

    Raises:
        OutOfMemoryError: no smaller micro-batches are possible, or state that has changed cannot be restored.
        RankError: another rank has raised that error.
    """
    config, progress = window.config, window.progress
    microbatches = progress.microbatches
    # The next micro-batch may already be on the device.
    if config.transfer is not None:
        config.transfer.forget()
    gc.collect()  # an exception and its frames may be a cycle
    release_caches(*config.random.devices)

    def cut() -> None:
        require_inputs(progress, 0, index, failure.text)
        require_restorable(window, f"running out of memory in micro-batch {index} ({failure.text})")
        if failure.here:
            _cut_smaller(window, index, failure.text)

    # If cutting fails on one rank, every rank must leave the window.
    on_all_ranks(config.sync, cut)
    window.restart()
    # Ranks with fewer micro-batches get extra turns, so that the collectives match.
    cut_to_equal_turns(microbatches, config.sync)
    on_all_ranks(config.sync, progress.weigh_again)
    if not failure.here:
        return
    progress.failures += 1
    config.reserve.tight = True
    warn(
        f"memory ran out in micro-batch {index}; the window begins again on all ranks, in "
        f"{len(microbatches)} micro-batches each. The update is the same. ({failure.text.splitlines()[0]})"
    )


def _cut_smaller(window: Transaction, index: int, failure: str) -> None:
    microbatches = window.progress.microbatches
    # A stand-in, on a rank without data, has no entry in `samples`.
    samples = microbatches.samples[index] if microbatches.samples else None
    # Pooled statistics depend on the micro-batch size, so smaller micro-batches would change the update.
    most = 0 if samples is None or window.pooled is not None else window.sizing.failed(samples)
    if not most:
        give_up(window, index, samples, failure)
    try:
        cut_large(microbatches, 0, most)
    except SplitError as error:
        raise OutOfMemoryError(
            f"Memory ran out in micro-batch {index} ({failure}), which cannot be cut into smaller ones. "
            f"{error}"
        ) from None


def on_all_ranks(sync: Sync, step: Callable[[], None]) -> None:
    """Call a function on every rank; if it raises on one rank, every rank raises.

    Args:
        sync: the ranks; each of them must make this call.
        step: a function that may raise on one rank only.

    Raises:
        RankError: `step` raised on another rank.

    Examples:
        >>> from .sync.local import Local
        >>> on_all_ranks(Local(), lambda: None)
    """
    step()
    # Not reached if `step` raises: `report_failure` then takes the place of this vote.
    sync.vote(raised=False)


def find_turn(window: Transaction, backward: Callable[[int], None]) -> int | None:
    """Return the first turn whose gradient, summed over the ranks, is not finite; None if none is found.

    Every rank runs each of its micro-batches again. A sharded gradient exists only after the reduction, so
    the turn can be found, but not the rank.

    Args:
        window: a window that will be restored.
        backward: ``backward(i)`` computes the gradient of micro-batch ``i``.
    """
    config = window.config
    parameters = [entry.parameter for entry in config.owned]
    microbatches = window.progress.microbatches
    # Extra turns too, because other ranks run micro-batches in them.
    for turn in range(len(microbatches) + microbatches.extra_turns):
        clear(config.owned)
        window.renew_sync()
        config.sync.begin_microbatch(last=True, zero_weight=True)
        error = None
        try:
            backward(turn)
        except Exception as raised:  # noqa: BLE001 - any kind, because the other ranks wait for this rank's vote
            error = raised
        # Each rank votes in each turn, or the others would wait.
        if config.sync.vote(error is not None):
            if error is not None and not out_of_memory(error):
                raise error
            return None  # this search needs more memory than the window; the error then names no turn
        own = [parameter.grad for parameter in parameters]
        reduced = config.sync.reduce(own, parameters, window.gradients.zeros)
        # After the reduction each rank has a shard, and any shard may contain the infinity.
        if config.sync.vote(not all_finite([each for each in reduced if each is not None])):
            return turn if turn < len(microbatches) else None
    return None


def bad_parameter(window: Transaction, gradients: list[Tensor | None]) -> str | None:
    """Return the name of the first parameter with a non-finite gradient element on any rank; None if none."""
    config = window.config
    # Gathered, because only the shard of another rank may be non-finite.
    names = config.sync.gather(first_bad_parameter(config.owned, gradients))
    return next(filter(None, names), None)
