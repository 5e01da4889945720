"""Adam's preconditioner as a metric for gradients: ``|g|^2`` becomes ``sum g^2 / (sqrt(v_hat) + eps)^q``.

The second moments ``v_hat`` are those before the window. So one metric measures all micro-batches and the
batch, and it does not depend on the window's own gradient, which would bias the estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, Optimizer

from superbatch.noise.meter import POWERS
from superbatch.torch.devices import in_float64

from ..gradient_sum import ManagedParameter, values

Norms = tuple[float | Tensor, ...]

UNKNOWN: Norms = (math.nan,) * len(POWERS)


def have_second_moments(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether all optimizers step by ``m / (sqrt(v_hat) + eps)``.

    Examples:
        >>> one = torch.zeros(1, requires_grad=True)
        >>> have_second_moments([AdamW([one])]), have_second_moments([torch.optim.SGD([one])])
        (True, False)
    """
    return all(isinstance(optimizer, Adam | AdamW | NAdam) for optimizer in optimizers)


class Preconditioner:
    """``1 / d`` with ``d = sqrt(v_hat) + eps`` for every parameter, during one window.

    It takes as much memory as the parameters, until the window ends. Coordinates that have had no gradient
    yet have no second moment. They are left out of the metric, in the micro-batches and in the batch.

    Args:
        owned: the parameters; their optimizers have second moments.
    """

    def __init__(self, owned: Sequence[ManagedParameter]) -> None:
        # Before the window, because its own gradient in the moments would bias the estimate below zero.
        self._inverse = [_inverse_of(entry) for entry in owned]

    def norms(self, index: int, gradient: Tensor) -> Norms:
        """Return ``sqrt(sum g^2 / d^q)`` of one parameter's gradient for q = 1 and 2; NaN if there is no d.

        Args:
            index: index of the parameter in `owned`.
            gradient: gradient of a micro-batch, or of the batch.
        """
        inverse = self._inverse[index]
        if inverse is None or gradient.is_sparse:
            return UNKNOWN
        elements = _real(gradient).to(inverse.dtype)
        preconditioned = elements * inverse
        # The dot product is not negative: it is the sum of g^2 / d.
        first = torch.dot(elements.reshape(-1), preconditioned.reshape(-1)).sqrt()
        norms = (first, torch.linalg.vector_norm(preconditioned))
        return tuple(norm.item() if norm.is_cpu else norm for norm in norms)

    def mean(self) -> float:
        """Return the mean of d, which normalises the metric: windows with a smaller d count the same."""
        total, count = 0.0, 0
        for inverse in self._inverse:
            if inverse is not None:
                present = inverse[inverse > 0]
                total, count = total + float(in_float64(present).reciprocal().sum()), count + present.numel()
        return total / count if count else math.nan


def _inverse_of(entry: ManagedParameter) -> Tensor | None:
    """Return 1 / d, zero for a second moment of zero, in float32 at least; None before the first update."""
    state, group = entry.optimizer.state.get(entry.target), entry.group
    if not state or "exp_avg_sq" not in state:
        return None
    correction = 1 - float(group["betas"][1]) ** float(state["step"])
    if not correction > 0:
        return None
    moment = _real(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])
    wide = torch.promote_types(moment.dtype, torch.float32)
    inverse = moment.to(wide).sqrt().div_(math.sqrt(correction)).add_(float(group["eps"])).reciprocal_()
    # Otherwise such coordinates would dominate the metric by 1 / d^2 = 1 / eps^2.
    return inverse.masked_fill_(moment == 0, 0.0)


def _real(tensor: Tensor) -> Tensor:
    elements = values(tensor)
    return torch.view_as_real(elements.resolve_conj()) if elements.is_complex() else elements
