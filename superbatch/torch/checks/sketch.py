"""Linear sketch of gradients: BUCKETS sums per parameter; exact for parameters with fewer elements.

Element ``i`` of a parameter is added to bucket ``i mod BUCKETS``, with a random sign that depends on
``i div BUCKETS``. Without signs, rows that add up to 0 would cancel, e.g. in a softmax layer's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..devices import has_float64
from ..modes import without_modes

BUCKETS = 251  # a prime, so that a bucket does not collect one column of a matrix
_ROWS = 1 << 12  # rows that are converted to float64 at a time: 8 MB


def sketch(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the sums of each gradient, shape (gradients, BUCKETS), in float64 on the host.

    Gradients may be dense, sparse or complex; None counts as 0.

    Examples:
        >>> dense = torch.zeros(500, 3)
        >>> dense[400] = torch.tensor([1.0, 2.0, 3.0])
        >>> sums = sketch([dense, dense.to_sparse(1), None])
        >>> torch.equal(sums[0], sums[1]), int(sums[0].abs().sum()), int(sums[2].abs().sum())
        (True, 6, 0)
    """
    with without_modes():  # or the check's dispatch modes would handle every operation here
        sums = torch.zeros(len(gradients), BUCKETS, dtype=torch.float64)
        for row, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                row += (_dense if gradient.layout is torch.strided else _sparse)(gradient.detach()).cpu()
    return sums


def _dense(gradient: Tensor) -> Tensor:
    flat = (torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient).reshape(-1)
    sums = torch.zeros(BUCKETS, dtype=_wide(flat.device), device=flat.device)
    if len(flat) <= BUCKETS:  # row 0 alone, whose sign is +1
        sums[: len(flat)] = flat
        return sums
    for number, chunk in enumerate(flat.split(_ROWS * BUCKETS)):
        rows = torch.zeros(-(-chunk.numel() // BUCKETS), BUCKETS, dtype=sums.dtype, device=flat.device)
        rows.view(-1)[: chunk.numel()] = chunk
        first = number * _ROWS
        sums += _signs(torch.arange(first, first + len(rows), device=flat.device)).to(sums.dtype) @ rows
    return sums


def _sparse(gradient: Tensor) -> Tensor:
    gradient = (gradient if gradient.layout is torch.sparse_coo else gradient.to_sparse()).coalesce()
    indices, values = gradient.indices(), gradient.values()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    values = values.reshape(indices.shape[1], -1)
    start = torch.zeros_like(indices[0])
    for dimension, size in enumerate(gradient.shape[: len(indices)]):
        start = start * size + indices[dimension]
    inner = values.shape[1]
    positions = (start[:, None] * inner + torch.arange(inner, device=values.device)).reshape(-1)
    sums = torch.zeros(BUCKETS, dtype=_wide(values.device), device=values.device)
    signed = values.reshape(-1).to(sums.dtype) * _signs(positions // BUCKETS)
    return sums.index_add_(0, positions % BUCKETS, signed)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float64 if has_float64(device) else torch.float32


def _signs(rows: Tensor) -> Tensor:
    """Return a pseudorandom +1 or -1 for each row; +1 for row 0."""
    mixed = (rows * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    return 1 - 2 * ((mixed ^ (mixed >> 13)) & 1)
