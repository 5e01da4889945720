"""Bucketed all-reduces of the gradients of a window.

A rank that has no memory for a bucket must not leave the others in its exchange: it frees its own gradients,
takes part with zeros in all exchanges that are left, and raises then. The vote before the step is where the
others hear of it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 << 20  # as DDP's default: large enough for bandwidth, small enough for memory

# One number per gradient tells every rank both whether any rank has it and whether one has it sparse.
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
    """Size of a dense gradient that need not exist."""

    dtype: torch.dtype
    device: torch.device
    nbytes: int
    numel: int


class Exchanges:
    """Exchanges of one reduction on this rank.

    Args:
        group: of the ranks.

    Attributes:
        made: how many there were.
        inside: one has begun and not ended. After an error the other ranks cannot be answered.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.made, self.inside = 0, False

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""
        self.inside = True
        dist.all_reduce(tensor, group=self._group)
        self.made, self.inside = self.made + 1, False


def kind(gradient: Tensor | None) -> float:
    """Return the number for a gradient: whether there is one, and whether it is sparse.

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
    held: Sequence[float],
    exchanges: Exchanges,
) -> list[Tensor | None]:
    """Return the sums of gradients over the ranks; None where no rank has one.

    Args:
        gradients: of this rank, one for each parameter.
        parameters: in the same order.
        zeros: ``zeros(i)`` makes an empty gradient ``i``.
        held: of each gradient the sum of its `kind` over the ranks.
        exchanges: of this reduction.

    Raises:
        BaseException: of this rank. Unless an exchange raised it, this rank has taken part in all of them.
    """
    likes = [None if each is None or each.is_sparse else _like(each) for each in gradients]
    summed: list[Tensor | None] = []
    try:
        for index, (gradient, ranks) in enumerate(zip(gradients, held, strict=True)):
            summed.append(_present(zeros(index) if gradient is None else gradient, ranks) if ranks else None)
        for gradient in summed:
            if gradient is not None and gradient.is_sparse:
                exchanges.sum(gradient)
        for bucket in buckets([g for g in summed if g is not None and not g.is_sparse]):
            _sum_bucket(bucket, exchanges)
    except BaseException as error:
        if not exchanges.inside:
            traceback.clear_frames(error.__traceback__)  # they hold a bucket
            summed.clear()
            gradients.clear()
            bucket = gradient = None
            _take_part(likes, parameters, zeros, held, exchanges)
        raise
    return summed


def _sum_bucket(bucket: list[Tensor], exchanges: Exchanges) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():  # a copy would be as large as it is
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
    held: Sequence[float],
    exchanges: Exchanges,
) -> None:
    """Take part with zeros in the exchanges that are left, in the memory of this rank's gradients."""
    for parameter in parameters:
        parameter.grad = None
    skip = exchanges.made
    dense: list[_Like] = []
    for index, (like, ranks) in enumerate(zip(likes, held, strict=True)):
        if ranks >= SPARSE:
            skip -= 1
            if skip < 0:
                exchanges.sum(_present(zeros(index), ranks))
        elif ranks:
            dense.append(_like(zeros(index)) if like is None else like)
    for bucket in buckets(dense)[max(skip, 0) :]:
        numbers = sum(each.numel for each in bucket)
        exchanges.sum(torch.zeros(numbers, dtype=bucket[0].dtype, device=bucket[0].device))


def _like(gradient: Tensor) -> _Like:
    return _Like(gradient.dtype, gradient.device, gradient.nbytes, gradient.numel())


def _present(gradient: Tensor, ranks: float) -> Tensor:
    """This rank's part of a gradient that some rank has."""
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
