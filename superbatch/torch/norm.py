"""The norm of a gradient that is many tensors, and whether all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, not_

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from .gradients import LOW_PRECISION, all_finite, values

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
    double = [torch.linalg.vector_norm(each, dtype=_double(each)) for each in elements]
    return float(torch.stack(double).norm()), True


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
    if not set(LOW_PRECISION).isdisjoint(map(_dtype, elements)):
        # A norm in bfloat16 has two to three digits: not enough to clip by.
        return [torch.linalg.vector_norm(each, dtype=_wide(each)) for each in elements]
    # As torch.nn.utils.get_total_norm does, in half its time for small models.
    return list(torch._foreach_norm(elements)) if elements else []  # pyright: ignore[reportPrivateImportUsage]  (as torch.optim does)


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
    first = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
