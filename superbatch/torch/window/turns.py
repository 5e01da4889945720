"""Equal numbers of micro-batches on ranks whose forwards are collective (`Sync.has_collective_forwards`).

A rank with fewer micro-batches cuts them into more, or runs its first one again with weight 0 (an *extra
turn*). A rank without data runs a sample of another rank with weight 0.
"""

from __future__ import annotations

import pickle

from superbatch.errors import InputError, SplitError

from ..checks.rank_counts import first_sample
from .microbatches import MicrobatchList
from .sync.sync import Sync


def equalize_turns(microbatches: MicrobatchList, sync: Sync) -> None:
    """Give each rank the same number of turns, including ranks without data.

    Args:
        microbatches: the micro-batches of this rank, changed in place; empty if it has no data.
        sync: ranks whose forwards are collective.

    Raises:
        InputError: this rank has no data, and a sample of another rank cannot be sent.
    """
    counts = cut_to_equal_turns(microbatches, sync)
    # Usually every rank has data. If none has, none runs a forward.
    if all(counts) or not any(counts):
        return
    sender = next(rank for rank, count in enumerate(counts) if count)
    sent = sync.gather(_pickled_sample(microbatches) if sync.index == sender else None)[sender]
    if len(microbatches):
        return
    if sent is None:
        raise InputError(
            "This rank has no batch, and the batch of another rank, which it would run with weight 0 in its "
            "place, cannot be pickled. Pass a batch of weight 0 on this rank."
        )
    microbatches.stand_in = [pickle.loads(sent)]


def cut_to_equal_turns(microbatches: MicrobatchList, sync: Sync) -> list[int]:
    """Cut this rank's micro-batches into as many as the other ranks have; extra turns fill the rest.

    The update does not depend on where a batch is cut. The micro-batches of a `Window` are not cut.

    Args:
        microbatches: the micro-batches of this rank, changed in place.
        sync: ranks whose forwards are collective.

    Returns:
        The number of micro-batches of each rank before the call.
    """
    counts = sync.microbatch_counts(len(microbatches), microbatches.samples)
    turns = max(counts)
    samples = microbatches.samples if microbatches.cut_from_one else None
    while samples is not None and len(microbatches) < turns:
        largest = max(range(len(microbatches)), key=samples.__getitem__)
        try:
            if samples[largest] < 2 or microbatches.split(largest, (samples[largest] + 1) // 2) < 2:
                break
        except SplitError:
            break
    microbatches.extra_turns = turns - len(microbatches)
    return counts


def _pickled_sample(microbatches: MicrobatchList) -> bytes | None:
    """Return the pickled first sample, or the first micro-batch if it cannot be cut; None if that fails."""
    # Pickled before the exchange, because an error inside it would leave the other ranks waiting.
    microbatch = microbatches.microbatches[0]
    sample = first_sample(microbatch, microbatches.paths)
    try:
        return pickle.dumps(microbatch if sample is None else sample)
    except Exception:  # noqa: BLE001 - the user's objects may raise anything when pickled
        return None
