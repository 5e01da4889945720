"""Custom torch.library operators with a backward, as in extensions; no engine has rules for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("superbatch_test_cases::bent", mutates_args=())
def bent(x: Tensor, slope: float) -> Tensor:
    """Separable: sin(x) + slope * x."""
    return torch.sin(x) + slope * x


@bent.register_fake
def _(x: Tensor, slope: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    x, ctx.slope = inputs
    ctx.save_for_backward(x)


def _bent_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * (torch.cos(x) + ctx.slope), None


bent.register_autograd(_bent_backward, setup_context=_save)


@torch.library.custom_op("superbatch_test_cases::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """Coupled: x minus its mean over dimension 0."""
    return x - x.mean(0)


@centred.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _centred_backward(ctx: Any, grad: Tensor) -> Tensor:
    return centred(grad)


centred.register_autograd(_centred_backward)
