"""Layout of the samples in a tensor: one dimension, as ``[outer][samples][inner]``.

A batch of N images has its samples in dimension 0, one row each. After ``x.view(N * T, F)`` each sample has
`inner` = T rows; after ``torch.cat([view1, view2])`` the samples come twice, `outer` = 2. Rows of a
micro-batch are then not in one piece, but a slice of ``[outer][samples][inner]`` all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from superbatch.batch.split import near_equal


class Layout(NamedTuple):
    """Dimension of the samples, and rows of each of them.

    Attributes:
        dim: the dimension, counted from the front.
        outer: how often all samples come.
        inner: rows of one sample, next to each other.

    Examples:
        >>> Layout(0).rows(5), Layout(0, outer=2, inner=3).rows(5)
        (5, 30)
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def rows(self, samples: int) -> int:
        """Return the size of the dimension for a number of samples."""
        return self.outer * samples * self.inner

    def at(self, dim: int) -> Layout:
        """Return the same in another dimension."""
        return Layout(dim, self.outer, self.inner)

    def repeated(self, outer: int) -> Layout:
        """Return the same with all samples coming `outer` times."""
        return Layout(self.dim, outer, self.inner)


class Part(NamedTuple):
    """The samples of one micro-batch: those from `start` to before `stop`."""

    number: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def parts_of(samples: int, size: int) -> list[Part]:
    """Return the micro-batches of a batch: of near-equal sizes, at most the given one.

    Examples:
        >>> parts_of(5, 3)
        [Part(number=0, start=0, stop=3), Part(number=1, start=3, stop=5)]
    """
    parts: list[Part] = []
    for count in near_equal(samples, size):
        start = parts[-1].stop if parts else 0
        parts.append(Part(len(parts), start, start + count))
    return parts


def cut(tensor: Tensor, layout: Layout, part: Part) -> Tensor:
    """Return the rows of a micro-batch.

    Examples:
        >>> cut(torch.arange(6), Layout(0, outer=2), Part(0, 1, 3))
        tensor([1, 2, 4, 5])
    """
    dim, outer, inner = layout
    if outer == 0:  # repeated no times
        return tensor
    if outer == 1:
        return tensor.narrow(dim, part.start * inner, part.samples * inner)
    # Told in full: of a tensor without elements -1 could be anything.
    blocks = tensor.unflatten(dim, (outer, tensor.shape[dim] // outer)).narrow(
        dim + 1, part.start * inner, part.samples * inner
    )
    return blocks.flatten(dim, dim + 1)


def join(pieces: Sequence[Tensor], layout: Layout) -> Tensor:
    """Return the tensor of all samples; the inverse of `cut`.

    Examples:
        >>> join([torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])], Layout(0, outer=2))
        tensor([0, 1, 2, 3, 4, 5])
    """
    dim, outer, _ = layout
    if len(pieces) == 1 or outer == 0:
        return pieces[0]
    if outer == 1:
        return torch.cat(list(pieces), dim)
    blocks = [piece.unflatten(dim, (outer, piece.shape[dim] // outer)) for piece in pieces]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)


def sized(shape: Sequence[int], layout: Layout, part: Part) -> list[int]:
    """Return a shape for the samples of a micro-batch: a new list, for a rule may run in several threads.

    Examples:
        >>> sized((8, 3), Layout(0), Part(0, 2, 4))
        [2, 3]
    """
    found = list(shape)
    found[layout.dim] = layout.rows(part.samples)
    return found
