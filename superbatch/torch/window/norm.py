"""Norm of a gradient of many tensors, and the check that all elements are finite."""

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
    """Return the 2-norm over all gradients, in float32 at least; None if there is no gradient.

    Examples:
        >>> float(norm_of([torch.tensor([3.0]), None, torch.tensor([[4.0]])]))
        5.0
    """
    elements = elements_of(gradients)
    return _joint(_norms(elements)) if elements else None


def finite_norm(gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
    """Return the 2-norm on the host, and whether every element is finite; usually with one transfer.

    Examples:
        >>> finite_norm([torch.tensor([3.0]), None, torch.tensor([4.0, float("inf")])])
        (inf, False)
    """
    elements = elements_of(gradients)
    # On the CPU floats are faster than three operations on tensors.
    if all(map(attrgetter("is_cpu"), elements)):
        value = math.hypot(*map(float, _norms(elements)))
    else:
        value = float(_joint(_norms(elements)))
    # False for both infinity and NaN, because the difference is NaN.
    if value - value == 0.0:
        return value, True
    if not all_finite(elements):
        return value, False
    # The sum of squares of finite elements has overflowed float32 (from 1.8e19 on): use float64.
    double = [torch.linalg.vector_norm(where_float64_is(each), dtype=_double(each)) for each in elements]
    return float(_joint(double)), True


def elements_of(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the elements of each gradient on this rank; of a sparse gradient, its values.

    Examples:
        >>> elements_of([torch.ones(1), None])
        [tensor([1.])]
    """
    return [values(each) for each in gradients if each is not None]


def _norms(elements: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, in float32 at least; bfloat16 has too few digits for clipping."""
    return [
        norm
        for group in alike(elements)
        # One foreach kernel for each device and dtype.
        for norm in fastpaths.norms(group, 2.0, torch.float32 if group[0].dtype in LOW_PRECISION else None)
    ]


def _joint(norms: list[Tensor]) -> Tensor:
    parts = [torch.linalg.vector_norm(torch.stack(group)) for group in alike(norms)]
    if len(parts) == 1:
        return parts[0]
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
