"""The norm of a gradient that is many tensors, and whether all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from .. import fastpaths
from ..devices import alike, where_float64_is
from .participants.gradient_sum import LOW_PRECISION, all_finite, values


def norm_of(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the 2-norm over all gradients, in float32 at least; None where there is no gradient.

    Examples:
        >>> float(norm_of([torch.tensor([3.0]), None, torch.tensor([[4.0]])]))
        5.0
    """
    elements = elements_of(gradients)
    # Sparse gradients by their summed values: duplicates of an index count once, summed.
    return _joint(_norms(elements)) if elements else None


def finite_norm(gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
    """Return the 2-norm on the host, and whether every element is finite (mostly one transfer).

    Examples:
        >>> finite_norm([torch.tensor([3.0]), None, torch.tensor([4.0, float("inf")])])
        (inf, False)
    """
    elements = elements_of(gradients)
    if all(map(attrgetter("is_cpu"), elements)):  # less than three operations on tensors
        value = math.hypot(*map(float, _norms(elements)))
    else:
        value = float(_joint(_norms(elements)))
    # Infinity minus itself and NaN minus itself are NaN: one comparison for both.
    if value - value == 0.0:
        return value, True
    if not all_finite(elements):
        return value, False
    # Every element is finite: the sum of squares overflowed, so take it in double precision.
    # A square overflows float32 from 1.8e19 on.
    double = [torch.linalg.vector_norm(where_float64_is(each), dtype=_double(each)) for each in elements]
    return float(_joint(double)), True


def elements_of(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the elements of each gradient on this rank: of a sparse one its summed values.

    Examples:
        >>> elements_of([torch.ones(1), None])
        [tensor([1.])]
    """
    return [values(each) for each in gradients if each is not None]


def _norms(elements: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in float32 at least: by one in bfloat16, of two digits, nobody can clip."""
    return [
        norm
        for group in alike(elements)
        # Grouped by device and dtype: one foreach kernel for each group.
        for norm in fastpaths.norms(group, 2.0, torch.float32 if group[0].dtype in LOW_PRECISION else None)
    ]


def _joint(norms: list[Tensor]) -> Tensor:
    parts = [torch.linalg.vector_norm(torch.stack(group)) for group in alike(norms)]
    if len(parts) == 1:
        return parts[0]
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
