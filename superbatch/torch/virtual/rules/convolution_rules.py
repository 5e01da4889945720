"""Convolutions whose channels are the samples.

The gradient of a convolution's weight is itself a convolution: of the input with the gradient of the output,
both with batch and channels exchanged. Autograd writes it so where that gradient is differentiated again (a
gradient penalty). It sums over its channels, so over the samples, and the sum is made by micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ir.calls import Call, Recipe, filled
from ..ir.layout import Layout
from ..ir.values import Operand, Value

aten: Any = torch.ops.aten


def _channels(x: Value, weight: Value, call: Call) -> Layout | None:
    """Return the layout of samples that are the summed channels; None if they are not."""
    summed = 0 if call.argument("transposed") else 1
    if call.argument("groups") != 1:
        return None
    if x.layout is None:  # the other has as many channels, and may be cut likewise
        return weight.layout.at(1) if weight.layout is not None and weight.layout.dim == summed else None
    same = weight.layout is None or weight.layout == x.layout.at(summed)
    return x.layout if x.layout.dim == 1 and same else None


def _operands(x: Value, weight: Value, layout: Layout, call: Call) -> list[Operand]:
    return [Operand(x, layout), Operand(weight, layout.at(0 if call.argument("transposed") else 1))]


def _convolution(call: Call) -> Recipe | None:
    """A sum over the channels, of which each micro-batch has its own."""
    x, weight = call.tensors[:2]
    layout = _channels(x, weight, call)
    if layout is None or call.argument("bias") is not None:  # which would be added once for each
        return None
    return Recipe(_operands(x, weight, layout, call), [None], filled(call))


def _backward(call: Call) -> Recipe | None:
    """Gradients of input and weight: each channel has its own, from the same gradient of the output."""
    grad, x, weight = call.tensors
    layout = _channels(x, weight, call)
    if layout is None or grad.layout is not None or call.argument("output_mask")[2]:
        return None
    cut = _operands(x, weight, layout, call)
    return Recipe([Operand(grad, None), *cut], [layout, cut[1].layout, None], filled(call))


RULES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.convolution: _convolution,
    aten._convolution: _convolution,
    aten.convolution_backward: _backward,
}
