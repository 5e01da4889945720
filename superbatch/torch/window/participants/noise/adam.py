"""Adam's preconditioner as a metric for gradients: ``|g|^2`` becomes ``sum g^2 / (sqrt(v_hat) + eps)^q``.

The second moments are those of the updates before the window: an optimizer changes them at a window's end
only, so that all micro-batches and the batch are measured by one metric, in which none of them has a part.
(With moments that hold the window's own gradient the estimates would be biased.)
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
    """Return whether all of them step by ``m / (sqrt(v_hat) + eps)``.

    Args:
        optimizers: of the accumulator.

    Examples:
        >>> one = torch.zeros(1, requires_grad=True)
        >>> have_second_moments([AdamW([one])]), have_second_moments([torch.optim.SGD([one])])
        (True, False)
    """
    return all(isinstance(optimizer, Adam | AdamW | NAdam) for optimizer in optimizers)


class Preconditioner:
    """``1 / d`` of every parameter, ``d = sqrt(v_hat) + eps``, as it is while one window is open.

    Held till the window is over: as much memory again as the parameters take.

    Coordinates that have had no gradient yet have no second moment: they are left out of the metric, in the
    micro-batches and in the batch.

    Args:
        owned: the parameters, of optimizers with second moments.
    """

    def __init__(self, owned: Sequence[ManagedParameter]) -> None:
        # Taken before the window: with its own gradient in the moments, the estimate is biased below zero.
        self._inverse = [_inverse_of(entry) for entry in owned]

    def norms(self, place: int, gradient: Tensor) -> Norms:
        """Return ``sqrt(sum g^2 / d^q)`` of one parameter's gradient for q = 1 and 2; NaN if there is no d.

        Args:
            place: of the parameter among the owned ones.
            gradient: of a micro-batch, or of the batch.
        """
        inverse = self._inverse[place]
        if inverse is None or gradient.is_sparse:
            return UNKNOWN
        elements = _real(gradient).to(inverse.dtype)
        stepped = elements * inverse
        half = torch.dot(elements.reshape(-1), stepped.reshape(-1)).sqrt()  # of squares over positive numbers
        norms = (half, torch.linalg.vector_norm(stepped))
        return tuple(norm.item() if norm.is_cpu else norm for norm in norms)

    def mean(self) -> float:
        """The mean of d, by which it is measured, so that windows count alike while second moments fall."""
        total, count = 0.0, 0
        for inverse in self._inverse:
            if inverse is not None:
                present = inverse[inverse > 0]
                total, count = total + float(in_float64(present).reciprocal().sum()), count + present.numel()
        return total / count if count else math.nan


def _inverse_of(entry: ManagedParameter) -> Tensor | None:
    """1 / d, zero where there is no second moment, in float32 at least; None before the first update."""
    state, group = entry.optimizer.state.get(entry.target), entry.group
    if not state or "exp_avg_sq" not in state:
        return None
    correction = 1 - float(group["betas"][1]) ** float(state["step"])
    if not correction > 0:
        return None
    moment = _real(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])
    wide = torch.promote_types(moment.dtype, torch.float32)
    inverse = moment.to(wide).sqrt().div_(math.sqrt(correction)).add_(float(group["eps"])).reciprocal_()
    # Otherwise such coordinates would dominate the metric: their 1 / d^2 is 1 / eps^2.
    return inverse.masked_fill_(moment == 0, 0.0)


def _real(tensor: Tensor) -> Tensor:
    elements = values(tensor)
    return torch.view_as_real(elements.resolve_conj()) if elements.is_complex() else elements
