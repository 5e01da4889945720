"""Batches without weight, for hosts that step with a GradScaler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def skip_without_gradient(scaler: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Let a scaler skip the step of a batch without weight, which has left no gradient.

    `GradScaler.step` fails where it finds no gradient; an overflow it skips. A host that averages over no
    label gets NaN, and skips as well.

    Args:
        scaler: a `torch.amp.GradScaler`; None: no-op.
        parameters: of the optimizer.

    Examples:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> skip_without_gradient(torch.amp.GradScaler("cpu"), [weight])
        >>> weight.grad
        tensor([inf, inf])
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if scaler is None or any(parameter.grad is not None for parameter in trained):
        return
    scaler.scale(torch.zeros((), device=trained[0].device))  # its number is made at the first loss
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, torch.inf)
