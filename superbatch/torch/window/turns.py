"""Micro-batches of ranks whose forwards wait for each other (`Sync.in_step`): as many turns on each of them.

A rank that has fewer micro-batches runs one of them again, without weight. One that has none at all runs a
sample that another rank sends it: the models must be called as the others call them.
"""

from __future__ import annotations

import pickle

from superbatch.errors import InputError, SplitError

from ..checks.rank_counts import first_sample
from .microbatches import MicrobatchList
from .sync.sync import Sync


def take_turns(pieces: MicrobatchList, sync: Sync) -> None:
    """Let each rank run as many micro-batches, also one without data.

    Args:
        pieces: of this rank; none where it has no data.
        sync: ranks whose forwards wait for each other.

    Raises:
        InputError: this rank has no data, and the samples of the others cannot be sent.
    """
    each = even_out(pieces, sync)
    if all(each) or not any(each):  # mostly; where no rank has data, none runs a forward
        return
    sender = next(index for index, count in enumerate(each) if count)
    sent = sync.gather(_pickled(pieces) if sync.index == sender else None)[sender]
    if len(pieces):
        return
    if sent is None:
        raise InputError(
            "This rank has no batch, a forward of sharded models waits for all ranks, and the batch of "
            "another rank cannot be pickled to be run here without weight. Pass a batch whose weight= is 0."
        )
    pieces.stand_in = [pickle.loads(sent)]


def even_out(pieces: MicrobatchList, sync: Sync) -> list[int]:
    """Let each rank run as many micro-batches; an update does not depend on where a batch is cut.

    A batch is cut into more of them as far as it can be; turns without weight make up what is missing then.
    The micro-batches of a `Window` are not cut.

    Args:
        pieces: of this rank.
        sync: ranks whose forwards wait for each other.

    Returns:
        The number of micro-batches that each rank had.
    """
    each = sync.turns(len(pieces), pieces.samples)
    turns = max(each)
    samples = pieces.samples if pieces.cut_from_one else None
    while samples is not None and len(pieces) < turns:
        largest = max(range(len(pieces)), key=samples.__getitem__)
        try:
            if samples[largest] < 2 or pieces.split(largest, (samples[largest] + 1) // 2) < 2:
                break
        except SplitError:
            break
    pieces.idle = turns - len(pieces)
    return each


def _pickled(pieces: MicrobatchList) -> bytes | None:
    """Return a sample to send, or a micro-batch that cannot be cut; None where it has no pickle."""
    # Pickled here and not by the exchange: an error of it would leave the others in there.
    part = pieces.microbatches[0]
    sample = first_sample(part, pieces.paths)
    try:
        return pickle.dumps(part if sample is None else sample)
    except Exception:  # noqa: BLE001 - any object may be in a batch, and raise what it likes
        return None
