"""Rules for convolutions whose channels are the samples.

The gradient of a convolution's weight is a convolution of the input with the gradient of the output, both
with batch and channels exchanged. Autograd calls this convolution if the gradient is differentiated again, as
for a gradient penalty. It sums over its channels, which are the samples. So micro-batches are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ir.calls import Call, OpStrategy, run_of
from ..ir.shard import PARTIAL, REPLICATE, Shard
from ..ir.values import Operand, Value

aten: Any = torch.ops.aten


def _channels(x: Value, weight: Value, call: Call) -> Shard | None:
    """Return the sharding of the samples if they are the summed channels; else None."""
    summed = 0 if call.argument("transposed") else 1  # weight [out, in, ...], transposed [in, out, ...]
    if call.argument("groups") != 1:  # the channels of a micro-batch would not be whole groups
        return None
    if x.shard is None:  # a full input has the channels of the weight, so it can be cut
        return weight.shard.at(1) if weight.shard is not None and weight.shard.dim == summed else None
    same = weight.shard is None or weight.shard == x.shard.at(summed)
    return x.shard if x.shard.dim == 1 and same else None


def _operands(x: Value, weight: Value, shard: Shard, call: Call) -> list[Operand]:
    return [Operand(x, shard), Operand(weight, shard.at(0 if call.argument("transposed") else 1))]


def _convolution(call: Call) -> OpStrategy | None:
    """Rule for a forward: a sum over the channels, each of which belongs to one micro-batch."""
    x, weight = call.tensors[:2]
    shard = _channels(x, weight, call)
    if shard is None or call.argument("bias") is not None:  # each micro-batch would add the bias
        return None
    return OpStrategy(_operands(x, weight, shard, call), [PARTIAL], run_of(call))


def _backward(call: Call) -> OpStrategy | None:
    """Rule for a backward: each channel's gradients are computed from the full gradient of the output."""
    grad, x, weight = call.tensors
    shard = _channels(x, weight, call)
    if shard is None or grad.shard is not None or call.argument("output_mask")[2]:
        return None
    cut = _operands(x, weight, shard, call)
    # The bias has no gradient here (output_mask[2] is False), so the third output is empty.
    return OpStrategy([Operand(grad, REPLICATE), *cut], [shard, cut[1].shard, PARTIAL], run_of(call))


RULES: dict[Any, Callable[[Call], OpStrategy | None]] = {
    aten.convolution: _convolution,
    aten._convolution: _convolution,
    aten.convolution_backward: _backward,
}
