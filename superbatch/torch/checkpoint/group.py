"""Ranks that write and read a checkpoint together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from superbatch.errors import CheckpointError

from ..window.sync.sync import Sync

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The ranks of a training, or a single process.

    Attributes:
        rank: index of this process.
        count: number of ranks.
        gather: returns the messages of all ranks, in rank order.
    """

    rank: int
    count: int
    gather: Callable[[Any], list[Any]]

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run a function on every rank; if one raises, all raise.

        Raises:
            CheckpointError: another rank failed; the text contains its error.
        """
        try:
            result = work()
        # BaseException, because a Ctrl-C on one rank must not leave the others waiting.
        except BaseException as error:
            self.gather(f"{type(error).__name__}: {error}")  # the others wait in their gather
            raise
        _raise_for(self.gather(None))
        return result

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """Run a function on the first rank, and return its result on all ranks.

        Raises:
            CheckpointError: the first rank failed; the text contains its error.
        """
        if self.rank == 0:
            try:
                result = work()
            # BaseException, as in `on_all_ranks`.
            except BaseException as error:
                # The other ranks get only the text of the error.
                self.gather((f"{type(error).__name__}: {error}", None))
                raise
            return self.gather((None, result))[0][1]
        error, result = self.gather((None, None))[0]
        _raise_for([error])
        return result


def group_of(sync: Sync, models: Sequence[nn.Module]) -> Group:
    """Return the ranks that share a model: all ranks if it is sharded, else those that share a window."""
    # If parameters are sharded, all ranks, because each must write its own shards.
    sharded = any(hasattr(p, "device_mesh") for model in models for p in model.parameters())
    if not sharded:
        return Group(sync.index, sync.count, sync.gather)
    # Not `sync.gather`, which returns one message per data-parallel rank, not one per rank.
    count = dist.get_world_size()

    def gather(message: Any) -> list[Any]:
        messages: list[Any] = [None] * count
        dist.all_gather_object(messages, message)
        return messages

    return Group(dist.get_rank(), count, gather)


def _raise_for(errors: Sequence[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            text = error.rstrip(".")
            raise CheckpointError(f"Rank {rank} failed: {text}. Correct the error on that rank.")
