"""Batches without weight in libraries that step with a GradScaler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def skip_without_gradient(scaler: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Make a scaler skip the step of a batch without weight, which has no gradient.

    `GradScaler.step` raises if no parameter has a gradient, but skips the step after an overflow. So the
    gradients are set to infinity. A training loop without superbatch would skip this step too, as its loss,
    a mean over zero labels, is NaN.

    Args:
        scaler: a `torch.amp.GradScaler`; None: do nothing.
        parameters: parameters of the optimizer.

    Examples:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> skip_without_gradient(torch.amp.GradScaler("cpu"), [weight])
        >>> weight.grad
        tensor([inf, inf])
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if scaler is None or any(parameter.grad is not None for parameter in trained):
        return
    # The first scaled loss creates the scale, which step() needs.
    scaler.scale(torch.zeros((), device=trained[0].device))
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, torch.inf)
