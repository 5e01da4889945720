"""Placements of a tensor in a virtual batch, in DTensor's words, with micro-batches in place of devices.

`Shard`: a micro-batch has its own rows of one dimension, read as ``[outer][samples][inner]``. A batch of N
images has its samples in dimension 0, one row each. After ``x.view(N * T, F)`` each sample has `inner` = T
rows. After ``torch.cat([view1, view2])`` all samples occur twice, `outer` = 2: the rows of a micro-batch are
then not contiguous, but still one slice of ``[outer][samples][inner]``.

`REPLICATE`: an input that each micro-batch reads in full. `PARTIAL`: an output that is reduced over the
micro-batches. Both are None, because in both cases the tensor itself is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from superbatch.batch.split import near_equal


class Shard(NamedTuple):
    """Placement of a tensor whose rows in one dimension belong to samples.

    Attributes:
        dim: the dimension, never negative.
        outer: number of times that the whole batch is repeated.
        inner: number of adjacent rows of each sample.

    Examples:
        >>> Shard(0).rows(5), Shard(0, outer=2, inner=3).rows(5)
        (5, 30)
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def rows(self, samples: int) -> int:
        """Return the size of the dimension for the given number of samples."""
        return self.outer * samples * self.inner

    def at(self, dim: int) -> Shard:
        """Return the sharding with the samples in another dimension."""
        return Shard(dim, self.outer, self.inner)

    def repeated(self, outer: int) -> Shard:
        """Return the sharding with the batch repeated another number of times."""
        return Shard(self.dim, outer, self.inner)


REPLICATE: Final = None
"""Placement of an input that each micro-batch reads in full."""

PARTIAL: Final = None
"""Placement of an output that is reduced over the micro-batches."""


class BatchSlice(NamedTuple):
    """Micro-batch `number` of the batch: its samples ``start:stop``."""

    number: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def batch_slices(samples: int, size: int) -> list[BatchSlice]:
    """Return the micro-batches of a batch: at most `size` samples each, in sizes that differ by at most 1.

    Examples:
        >>> batch_slices(5, 3)
        [BatchSlice(number=0, start=0, stop=3), BatchSlice(number=1, start=3, stop=5)]
    """
    slices: list[BatchSlice] = []
    for count in near_equal(samples, size):
        start = slices[-1].stop if slices else 0
        slices.append(BatchSlice(len(slices), start, start + count))
    return slices


def cut(tensor: Tensor, shard: Shard, microbatch: BatchSlice) -> Tensor:
    """Return the rows of a micro-batch.

    Examples:
        >>> cut(torch.arange(6), Shard(0, outer=2), BatchSlice(0, 1, 3))
        tensor([1, 2, 4, 5])
    """
    dim, outer, inner = shard
    if outer == 0:  # as after x.repeat(0, 1): empty in a micro-batch too
        return tensor
    if outer == 1:
        return tensor.narrow(dim, microbatch.start * inner, microbatch.samples * inner)
    # Both sizes explicitly, because torch raises for a -1 in the shape of an empty tensor.
    blocks = tensor.unflatten(dim, (outer, tensor.shape[dim] // outer)).narrow(
        dim + 1, microbatch.start * inner, microbatch.samples * inner
    )
    return blocks.flatten(dim, dim + 1)  # a copy: the rows of several blocks have no common stride


def join(rows: Sequence[Tensor], shard: Shard) -> Tensor:
    """Return the tensor of all samples; the inverse of `cut`.

    Examples:
        >>> join([torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])], Shard(0, outer=2))
        tensor([0, 1, 2, 3, 4, 5])
    """
    dim, outer, _ = shard
    if len(rows) == 1 or outer == 0:  # avoids a copy of the batch
        return rows[0]
    if outer == 1:
        return torch.cat(list(rows), dim)
    # Block by block: joining [0, 3] and [1, 2, 4, 5] directly would give [0, 3, 1, 2, 4, 5].
    blocks = [each.unflatten(dim, (outer, each.shape[dim] // outer)) for each in rows]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)


def microbatch_shape(shape: Sequence[int], shard: Shard, microbatch: BatchSlice) -> list[int]:
    """Return the shape of a micro-batch's rows, from the shape for the whole batch.

    Examples:
        >>> microbatch_shape((8, 3), Shard(0), BatchSlice(0, 2, 4))
        [2, 3]
    """
    sizes = list(shape)  # a new list: rules are cached for the process, and threads share them
    sizes[shard.dim] = shard.rows(microbatch.samples)
    return sizes
