"""Loop over batches with the same number of updates on every rank, although some ranks have less data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist

from superbatch.errors import RankError

from .memory.out_of_memory import out_of_memory
from .window.sync.faults import Position

Batch = TypeVar("Batch")


def until_all_end(batches: Iterable[Batch]) -> Iterator[Batch | None]:
    """Yield the batches of this rank, then None until the last rank has ended.

    Pass each item to an `Accumulator`, None too: the rank then takes part in the update without data. Each
    batch costs an exchange of two numbers over the default process group. If you break out of the loop, do
    so on every rank.

    Args:
        batches: the batches of this rank; there may be none.

    Yields:
        The batches in order, then None; every rank yields the same number of items.

    Raises:
        RankError: `batches` raised an error on another rank, or another rank has ended or hangs. The rank
            with the error raises that error.

    Examples:
        >>> list(until_all_end([1, 2]))  # one process: the batches
        [1, 2]
    """
    # A single process exchanges nothing.
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield from batches
        return
    remaining = iter(batches)
    ended = False
    while True:
        batch = None
        # A rank that has ended keeps exchanging, so that the others are not left waiting.
        if not ended:
            try:
                batch = next(remaining)
            except StopIteration:
                ended = True
            # Any error, also KeyboardInterrupt, because the other ranks wait for this one.
            except BaseException:
                with suppress(RankError):  # raised if they cannot be reached; this rank's own error is raised
                    _sum(active=False, failed=True)  # the others wait in this exchange
                raise
        active, failed = _sum(active=not ended, failed=False)
        if failed:
            raise RankError(
                "Another rank failed while it loaded its next batch, so no rank makes the update. Correct "
                "the error that the other rank raises."
            )
        if not active:
            return
        yield batch


def _sum(*, active: bool, failed: bool) -> list[int]:
    """Return the number of ranks that have a batch, and the number of ranks that have failed.

    Raises:
        RankError: a rank cannot be reached.
    """
    # nccl reduces tensors on the GPU only.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor([active, failed], dtype=torch.int32, device=device)
    try:
        dist.all_reduce(numbers)
    except RuntimeError as error:
        # Out of memory is this rank's own error, not a broken connection.
        if out_of_memory(error):
            raise
        # After a failed collective the connection cannot be used again.
        raise Position().record_lost(error) from error
    return numbers.tolist()
