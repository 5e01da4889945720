"""The end of the data on several ranks: all of them make the same number of updates."""

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

    Pass each to `Accumulator` as it comes: None takes part in the update without data. Two numbers are
    exchanged over the default process group for each batch. A loop that ends early must end on every rank.

    Args:
        batches: of this rank: any number, also none.

    Yields:
        As many items on every rank: the batches in order, then None.

    Raises:
        RankError: `batches` raised an error on another rank, or one has ended or hangs. The rank with the
            error raises its own.

    Examples:
        >>> list(until_all_end([1, 2]))  # one process: the batches
        [1, 2]
    """
    # One process: no exchange.
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
            # KeyboardInterrupt too: the others wait for this rank.
            except BaseException:
                with suppress(RankError):  # where they cannot be reached, the error here says more
                    _sum(active=False, failed=True)  # the others wait in this exchange
                raise
        # One sum for both numbers.
        active, failed = _sum(active=not ended, failed=False)
        if failed:
            raise RankError(
                "Another rank failed while it loaded its next batch, so no rank makes the update. "
                "Correct the error that it raises."
            )
        if not active:
            return
        yield batch


def _sum(*, active: bool, failed: bool) -> list[int]:
    """Return the number of ranks that have a batch, and of those that have failed.

    Raises:
        RankError: a rank cannot be reached.
    """
    # nccl reduces tensors on the GPU only.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor([active, failed], dtype=torch.int32, device=device)
    try:
        dist.all_reduce(numbers)
    except RuntimeError as error:
        # Lack of memory is this rank's own error, not a broken connection.
        if out_of_memory(error):
            raise
        # After a failed collective the connection cannot be used again.
        raise Position().lose(error) from error
    return numbers.tolist()
