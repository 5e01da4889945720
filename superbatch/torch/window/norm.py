"""The norm of a gradient that is many tensors, and whether all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, not_

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ..devices import alike, where_float64_is
from .participants.gradient_sum import LOW_PRECISION, all_finite, values

# Elements up to which a tensor on the CPU is copied, not called for alone: biases, scales. It takes less time
# up to 1024 and more, but a copy lies beside the gradients, where the peak of a tiny model would show it.
SMALL = 256

_is_cpu, _is_sparse, _dtype = attrgetter("is_cpu"), attrgetter("is_sparse"), attrgetter("dtype")


def norm_of(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the 2-norm over all gradients, in float32 at least; None where there is no gradient.

    Examples:
        >>> float(norm_of([torch.tensor([3.0]), None, torch.tensor([[4.0]])]))
        5.0
    """
    elements = elements_of(gradients)
    return _joint(_norms(elements)) if elements else None


def finite_norm(gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
    """Return the 2-norm on the host, and whether every element is finite (mostly one transfer).

    Examples:
        >>> finite_norm([torch.tensor([3.0]), None, torch.tensor([4.0, float("inf")])])
        (inf, False)
    """
    elements = elements_of(gradients)
    if all(map(_is_cpu, elements)):  # a few numbers: less than the calls of three operations on tensors
        value = math.hypot(*map(float, _norms(_fewer(elements))))
    else:
        value = float(_joint(_norms(elements)))
    if value - value == 0.0:
        return value, True
    if not all_finite(elements):
        return value, False
    # Every element is finite: the sum of squares overflowed, so take it in double precision.
    double = [torch.linalg.vector_norm(where_float64_is(each), dtype=_double(each)) for each in elements]
    return float(_joint(double)), True


def elements_of(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the elements of each gradient that there is (of a sparse one its summed values).

    Examples:
        >>> elements_of([torch.ones(1), None])
        [tensor([1.])]
    """
    present = [gradient for gradient in gradients if gradient is not None]
    return [values(gradient) for gradient in present] if any(map(_is_sparse, present)) else present


def _norms(elements: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor."""
    is_low = not set(LOW_PRECISION).isdisjoint(map(_dtype, elements))
    if not is_low and all(map(_is_cpu, elements)):
        # As torch.nn.utils.get_total_norm does, in half its time for small models.
        return list(torch._foreach_norm(elements)) if elements else []  # pyright: ignore[reportPrivateImportUsage]  (as torch.optim does)
    # By device and dtype: torch calls one kernel for each tensor where they are not alike. A norm
    # in bfloat16 has two to three digits: not enough to clip by.
    return [
        norm
        for group in alike(elements)
        for norm in torch._foreach_norm(group, 2, torch.float32 if group[0].dtype in LOW_PRECISION else None)  # pyright: ignore[reportPrivateImportUsage]  (as torch.optim does)
    ]


def _fewer(elements: list[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors: the small ones copied into one, as `DistributedDataParallel` does.

    On the CPU each tensor takes a call: for the 27 of a narrow transformer twice the time of this.
    """
    if set(map(type, elements)) != {Tensor}:  # of a subclass it is not known what its elements are
        return elements
    are_small = [count <= SMALL for count in map(Tensor.numel, elements)]
    small = list(compress(elements, are_small))
    if len(small) < 2:
        return elements
    return [*compress(elements, map(not_, are_small)), _flatten_dense_tensors(small)]


def _joint(norms: list[Tensor]) -> Tensor:
    parts = [torch.linalg.vector_norm(torch.stack(group)) for group in alike(norms)]
    if len(parts) == 1:
        return parts[0]
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
