"""Sharding of the samples in a tensor: one dimension, read as ``[outer][samples][inner]``.

A batch of N images has its samples in dimension 0, one row each. After ``x.view(N * T, F)`` each sample has
`inner` = T rows. After ``torch.cat([view1, view2])`` all samples come twice, `outer` = 2: the rows of a
micro-batch are then not contiguous, but still one slice of ``[outer][samples][inner]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from superbatch.batch.split import near_equal


class Shard(NamedTuple):
    """Dimension that is sharded by samples, and the rows of each sample in it.

    Attributes:
        dim: the dimension, never negative.
        outer: number of repetitions of the whole batch.
        inner: adjacent rows of one sample.

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
        """Return the sharding with another number of repetitions of the batch."""
        return Shard(self.dim, outer, self.inner)


class Part(NamedTuple):
    """One micro-batch: the samples ``start:stop`` of the batch."""

    number: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def parts_of(samples: int, size: int) -> list[Part]:
    """Return the micro-batches of a batch: their sizes differ by at most 1, and none exceeds `size`.

    Examples:
        >>> parts_of(5, 3)
        [Part(number=0, start=0, stop=3), Part(number=1, start=3, stop=5)]
    """
    parts: list[Part] = []
    for count in near_equal(samples, size):
        start = parts[-1].stop if parts else 0
        parts.append(Part(len(parts), start, start + count))
    return parts


def cut(tensor: Tensor, shard: Shard, part: Part) -> Tensor:
    """Return the rows of a micro-batch.

    Examples:
        >>> cut(torch.arange(6), Shard(0, outer=2), Part(0, 1, 3))
        tensor([1, 2, 4, 5])
    """
    dim, outer, inner = shard
    if outer == 0:  # e.g. x.repeat(0, 1): the dimension is empty, in a micro-batch too
        return tensor
    if outer == 1:
        return tensor.narrow(dim, part.start * inner, part.samples * inner)
    # Both sizes in full: -1 is ambiguous for a tensor without elements, and torch raises.
    blocks = tensor.unflatten(dim, (outer, tensor.shape[dim] // outer)).narrow(
        dim + 1, part.start * inner, part.samples * inner
    )
    return blocks.flatten(dim, dim + 1)  # copies: the rows of several blocks have no common stride


def join(rows: Sequence[Tensor], shard: Shard) -> Tensor:
    """Return the tensor of all samples; the inverse of `cut`.

    Examples:
        >>> join([torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])], Shard(0, outer=2))
        tensor([0, 1, 2, 3, 4, 5])
    """
    dim, outer, _ = shard
    if len(rows) == 1 or outer == 0:  # one micro-batch: no copy of the batch
        return rows[0]
    if outer == 1:
        return torch.cat(list(rows), dim)
    # Concatenating the rows as they are would interleave the blocks: [0, 3] and [1, 2, 4, 5] of two blocks.
    blocks = [each.unflatten(dim, (outer, each.shape[dim] // outer)) for each in rows]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)


def sized(shape: Sequence[int], shard: Shard, part: Part) -> list[int]:
    """Return the shape of the whole batch, changed to the samples of a micro-batch.

    Examples:
        >>> sized((8, 3), Shard(0), Part(0, 2, 4))
        [2, 3]
    """
    found = list(shape)  # a new list: rules are cached for the process, and threads share them
    found[shard.dim] = shard.rows(part.samples)
    return found
