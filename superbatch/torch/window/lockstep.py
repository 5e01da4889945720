"""Windows of ranks whose forwards wait for each other, as those of sharded models do (`Sync.in_step`).

After the last turn every rank hears how the window went on the others. Where memory ran out, all ranks begin
it again, in as many smaller micro-batches each; after another error all ranks leave it. Until then a rank
that has failed takes part in what the others wait for (`Sync.catch_up`), with one sample in each turn.
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
from .turns import even_out

_MOST_TRIED = 4


def work_in_step(window: OpenWindow) -> None:
    """Run `loss_fn` on all micro-batches of a window, as many on each rank.

    Args:
        window: open on every rank.

    Raises:
        OutOfMemoryError: a single sample does not fit on some rank, or micro-batches cannot be cut smaller.
        RankError: another rank has failed.
    """
    one = backward_of(window)
    while (failure := _until_failure(window, one)) is not None:
        progress = window.transaction.progress
        index = progress.next if progress.current is None else progress.current
        index = max(0, min(index, len(progress.microbatches) - 1))  # behind it are turns without weight
        window.end_iteration()
        window.transaction.modes.restore()
        _begin_again(window.transaction, index, failure)


def with_backward(parts: list[tuple[Tensor, float]], sync: Sync) -> list[tuple[Tensor, float]]:
    """Return the losses of a micro-batch that have a backward, each with its factor.

    Where other ranks wait for a backward, one is run here for each loss that has none.

    Args:
        parts: losses with their factors; none where the micro-batch has no weight at all.
        sync: the ranks.

    Examples:
        >>> from .sync.local import Local
        >>> with_backward([(torch.ones(()), 0.5), (torch.tensor(torch.nan), 0.0)], Local())
        [(tensor(1.), 0.5)]
    """
    # A mean without weight may be NaN, and 0 x NaN is NaN.
    run = [each for each in parts if each[1] or (sync.in_step and bool(each[0].isfinite()))]
    if sync.in_step:
        missing = max(1, len(parts)) - len(run)
        # Each backward on the other ranks waits for one here.
        for number in range(1, missing + 1):
            sync.idle_backward(again=bool(run) or number < missing)
    return run


class Failure(NamedTuple):
    """Lack of memory: the text of the error, and whether it was raised on this rank."""

    text: str
    here: bool


def _until_failure(window: OpenWindow, one: Callable[[Any], None]) -> Failure | None:
    """Run all turns; return how memory ran out on any rank, None where it did not.

    Raises:
        BaseException: of this rank, which has to `catch_up` before it leaves the window.
        RankError: another rank has failed.
    """
    transaction = window.transaction
    failure: Failure | None = None
    try:
        for microbatch in window:
            one(microbatch)
            microbatch = None  # the iteration takes it apart where memory is short
    except BaseException as error:
        if not out_of_memory(error):
            raise
        # clear_frames() skips this frame, which is still running: the reference goes by hand.
        microbatch = None
        catch_up(transaction, error)
        traceback.clear_frames(error.__traceback__)
        failure = Failure(str(error) or type(error).__name__, here=True)
    # All ranks ask after the last turn: until then they are inside collectives.
    (memory,) = transaction.config.sync.sum_numbers([failure is not None])
    return failure or (Failure("on another rank", here=False) if memory else None)


def catch_up(window: Transaction, error: BaseException | None) -> None:
    """Let the other ranks come to the end of the turns of a window in which this one has failed.

    Args:
        window: to be left, or to begin again.
        error: of this rank.
    """
    config, progress = window.config, window.progress
    # After a RankError, or a broken transport, nobody waits any more.
    if not progress.in_turns or config.loss_fn is None or isinstance(error, RankError) or is_transport(error):
        return
    progress.in_turns = False
    if error is not None and out_of_memory(error):
        traceback.clear_frames(error.__traceback__)
        gc.collect()  # an exception and its frames may be a cycle
        release_caches(*config.random.devices)
    left = len(progress.microbatches) + progress.microbatches.idle - progress.turns
    # A rank that failed before its first turn has not entered no_sync as the others have.
    if not progress.turns:
        window.renew_sync()
        config.sync.turn(last=left == 1, idle=True)
        left -= 1
    first = progress.next if progress.current is None else progress.current
    # Several candidates: the forward of one may fail for the same reason as the window's.
    forwards = [partial(_forward_of_one, window, index) for index in _from(first, progress)]
    while config.sync.catch_up(forwards) and left:
        config.sync.turn(last=left == 1, idle=True)
        left -= 1


def _from(first: int, progress: Progress) -> list[int]:
    """Return a few micro-batches, that of the failure first."""
    count = len(progress.microbatches.runs)
    # The failed one first: its shapes are known to reach every collective.
    return list(dict.fromkeys([min(first, count - 1), *range(count)]))[:_MOST_TRIED]


def _forward_of_one(window: Transaction, index: int) -> Tensor:
    """Run the loss on one sample of a micro-batch, or on all of it where it cannot be cut."""
    config, pieces = window.config, window.progress.microbatches
    assert config.loss_fn is not None
    part = pieces.runs[index]
    # It cannot be cut: all of it is run.
    with suppress(SplitError):
        part = plan_of(part, **pieces.paths).take(0, 1)
    loss = config.declared.arguments(config.loss_fn(to_device(part, config.device)))[0]
    return torch.stack(list(loss.values())).sum() if isinstance(loss, Mapping) else loss


def _begin_again(window: Transaction, index: int, failure: Failure) -> None:
    """Restore everything as before the window, and cut smaller micro-batches, as many on each rank."""
    config, progress = window.config, window.progress
    pieces = progress.microbatches
    # A micro-batch on its way to the device holds memory.
    if config.transfer is not None:
        config.transfer.forget()
    gc.collect()  # an exception and its frames may be a cycle
    release_caches(*config.random.devices)

    def cut() -> None:
        require_inputs(progress, 0, index, failure.text)
        require_restorable(window, f"micro-batch {index}, for which there was no memory ({failure.text})")
        if failure.here:
            _cut_smaller(window, index, failure.text)

    # A vote: if cutting fails on one rank, every rank must leave the window.
    on_all_ranks(config.sync, cut)
    window.restart()
    # Ranks that cut nothing get idle turns, so that the collectives match.
    even_out(pieces, config.sync)
    on_all_ranks(config.sync, progress.weigh_again)
    if not failure.here:
        return
    progress.failures += 1
    config.reserve.tight = True
    warn(
        f"memory ran out in micro-batch {index}; the window begins again on all ranks, in {len(pieces)} "
        f"micro-batches each. The update is the same. ({failure.text.splitlines()[0]})"
    )


def _cut_smaller(window: Transaction, index: int, failure: str) -> None:
    pieces = window.progress.microbatches
    samples = pieces.samples[index] if pieces.samples else None  # none of what stands in for data
    # Pooled statistics depend on the micro-batch size, so smaller ones are another update.
    most = 0 if samples is None or window.pooled is not None else window.sizing.failed(samples)
    if not most:
        give_up(window, index, samples, failure)
    try:
        cut_large(pieces, 0, most)
    except SplitError as error:
        raise OutOfMemoryError(
            f"There was no memory for micro-batch {index} ({failure}), and it cannot be cut smaller: {error}"
        ) from None


def on_all_ranks(sync: Sync, step: Callable[[], None]) -> None:
    """Take a step that may fail on one rank alone; every rank leaves the window then.

    Args:
        sync: the ranks, each of which takes it.
        step: raises where it fails.

    Raises:
        RankError: the step failed on another rank.

    Examples:
        >>> from .sync.local import Local
        >>> on_all_ranks(Local(), lambda: None)
    """
    step()
    # Reached only without an error; a failing rank votes through `tell`.
    sync.vote(raised=False)


def find_turn(window: Transaction, backward: Callable[[int], None]) -> int | None:
    """Return the first turn whose gradient, summed over the ranks, is not finite; None where none is found.

    Every rank runs each of its micro-batches again. A gradient of shards is known after its reduction alone,
    so the turn is found, and not the rank.

    Args:
        window: about to be restored.
        backward: ``backward(i)`` computes the gradient of micro-batch ``i``.
    """
    config = window.config
    parameters = [entry.parameter for entry in config.owned]
    pieces = window.progress.microbatches
    # Idle turns too: other ranks run micro-batches there.
    for turn in range(len(pieces) + pieces.idle):
        clear(config.owned)
        window.renew_sync()
        config.sync.turn(last=True, idle=True)
        error = None
        try:
            backward(turn)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait to hear of it
            error = raised
        # Each rank votes in each turn, or the others would wait.
        if config.sync.vote(error is not None):
            if error is not None and not out_of_memory(error):
                raise error
            return None  # the sums are in memory beside this: without the turn, the error is what it is
        own = [parameter.grad for parameter in parameters]
        reduced = config.sync.reduce(own, parameters, window.gradients.zeros)
        # After the reduction every rank has a shard: any of them may hold the infinity.
        if config.sync.vote(not all_finite([each for each in reduced if each is not None])):
            return turn if turn < len(pieces) else None
    return None


def bad_parameter(window: Transaction, gradients: list[Tensor | None]) -> str | None:
    """Return the first parameter with an element in any rank's shard that is not finite.

    Args:
        window: of the gradients.
        gradients: this rank's shards.
    """
    config = window.config
    # Gathered: a shard of another rank may be the one that is not finite.
    names = config.sync.gather(first_bad_parameter(config.owned, gradients))
    return next(filter(None, names), None)
