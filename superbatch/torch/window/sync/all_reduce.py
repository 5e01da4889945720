"""Bucketed all-reduces of the gradients of a window.

A rank that has no memory for a bucket must not leave the others waiting. It frees its own gradients, takes
part with zeros in all remaining exchanges, and then raises. The vote before the step informs the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 << 20  # DDP's default: large enough for bandwidth, small enough for memory

# The sum of these numbers over the ranks shows whether any rank has a gradient, and whether one is sparse.
_DENSE, SPARSE = 1.0, float(1 << 20)


class _Sized(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=_Sized)


class _Like(NamedTuple):
    """Dtype, device and size of a dense gradient, which may already be freed."""

    dtype: torch.dtype
    device: torch.device
    nbytes: int
    numel: int


class Exchanges:
    """Makes and counts the exchanges of one reduction on this rank.

    Attributes:
        completed: number of exchanges that have ended.
        inside: True during an exchange. If an error comes there, the other ranks cannot be reached.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.completed, self.inside = 0, False

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""
        self.inside = True
        dist.all_reduce(tensor, group=self._group)
        self.completed, self.inside = self.completed + 1, False


def kind(gradient: Tensor | None) -> float:
    """Return a number that says whether a gradient is missing, dense or sparse.

    Examples:
        >>> kind(None), kind(torch.ones(2))
        (0.0, 1.0)
    """
    if gradient is None:
        return 0.0
    return SPARSE if gradient.is_sparse else _DENSE


def all_reduced(
    gradients: list[Tensor | None],
    parameters: Sequence[Tensor],
    zeros: Callable[[int], Tensor],
    kind_sums: Sequence[float],
    exchanges: Exchanges,
) -> list[Tensor | None]:
    """Return the sums of gradients over the ranks, with None for a gradient that no rank has.

    Args:
        gradients: this rank's, one for each parameter.
        parameters: the parameters, in the same order.
        zeros: ``zeros(i)`` returns a gradient of zeros for parameter ``i``.
        kind_sums: for each gradient the sum of its `kind` over the ranks.
        exchanges: makes the exchanges of this reduction.

    Raises:
        BaseException: an error of this rank. Unless an exchange raised it, this rank has taken part in all
            exchanges.
    """
    likes = [None if each is None or each.is_sparse else _like(each) for each in gradients]
    summed: list[Tensor | None] = []
    try:
        for index, (gradient, ranks) in enumerate(zip(gradients, kind_sums, strict=True)):
            summed.append(_present(zeros(index) if gradient is None else gradient, ranks) if ranks else None)
        for gradient in summed:
            if gradient is not None and gradient.is_sparse:
                exchanges.sum(gradient)
        for bucket in buckets([g for g in summed if g is not None and not g.is_sparse]):
            _sum_bucket(bucket, exchanges)
    except BaseException as error:
        if not exchanges.inside:
            traceback.clear_frames(error.__traceback__)  # the frames hold a bucket
            summed.clear()
            gradients.clear()
            bucket = gradient = None
            _take_part(likes, parameters, zeros, kind_sums, exchanges)
        raise
    return summed


def _sum_bucket(bucket: list[Tensor], exchanges: Exchanges) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():  # no copy is needed
        exchanges.sum(bucket[0])
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    exchanges.sum(flat)
    for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _take_part(
    likes: Sequence[_Like | None],
    parameters: Sequence[Tensor],
    zeros: Callable[[int], Tensor],
    kind_sums: Sequence[float],
    exchanges: Exchanges,
) -> None:
    """Free this rank's gradients, and take part with zeros in the remaining exchanges."""
    for parameter in parameters:
        parameter.grad = None
    # This rank has made these exchanges before it failed, and the other ranks do not repeat them.
    skip = exchanges.completed
    dense: list[_Like] = []
    for index, (like, ranks) in enumerate(zip(likes, kind_sums, strict=True)):
        if ranks >= SPARSE:
            skip -= 1
            if skip < 0:
                exchanges.sum(_present(zeros(index), ranks))
        elif ranks:
            dense.append(_like(zeros(index)) if like is None else like)
    # The same buckets as on the other ranks, because they depend only on sizes, dtypes and order.
    for bucket in buckets(dense)[max(skip, 0) :]:
        numbers = sum(each.numel for each in bucket)
        exchanges.sum(torch.zeros(numbers, dtype=bucket[0].dtype, device=bucket[0].device))


def _like(gradient: Tensor) -> _Like:
    return _Like(gradient.dtype, gradient.device, gradient.nbytes, gradient.numel())


def _present(gradient: Tensor, ranks: float) -> Tensor:
    """Return a gradient in the layout in which the ranks sum it."""
    if ranks >= SPARSE and not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    return gradient.coalesce() if gradient.is_sparse else gradient


def buckets(tensors: list[S], limit: int = BUCKET_BYTES) -> list[list[S]]:
    """Group tensors of one dtype and device, in order, into at most `limit` bytes (or one tensor).

    Examples:
        >>> [len(bucket) for bucket in buckets([torch.zeros(4)] * 5, limit=32)]
        [2, 2, 1]
    """
    grouped: list[list[S]] = []
    open_bucket: dict[tuple[torch.dtype, torch.device], list[S]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        bucket = open_bucket.get(key)
        if bucket is None or sum(t.nbytes for t in bucket) + tensor.nbytes > limit:
            bucket = open_bucket[key] = []
            grouped.append(bucket)
        bucket.append(tensor)
    return grouped
