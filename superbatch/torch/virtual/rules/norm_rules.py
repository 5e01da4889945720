"""Rules for layer, RMS and group normalisation, which normalise each sample by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, OpStrategy, operator, run_of, substituted
from ..ir.shard import PARTIAL, REPLICATE, BatchSlice, Shard
from ..ir.strides import with_kernel_strides
from ..ir.values import Operand, Run

aten: Any = torch.ops.aten


def _layer_norm(call: Call) -> OpStrategy | None:
    value = call.tensors[0]
    own = len(call.argument("normalized_shape"))
    # The last `own` dimensions are normalised together, so the samples must be in front of them.
    if value.shard is None or value.shard.dim >= value.meta.dim() - own:
        return None
    if any(other.shard is not None for other in call.tensors[1:]):
        return None
    operands = [Operand(value, value.shard), *(Operand(other, REPLICATE) for other in call.tensors[1:])]
    return OpStrategy(operands, [value.shard] * len(_results(call)), run_of(call))


def _results(call: Call) -> Any:
    return call.func._schema.returns


def _layer_norm_backward(call: Call) -> OpStrategy | None:
    grad, x = call.tensors[:2]
    own = len(call.argument("normalized_shape"))
    shard = x.shard or grad.shard  # one of both may be full, as the expanded gradient of a sum is
    if shard is None or shard.dim >= x.meta.dim() - own:
        return None
    rows, operands = shard.rows(call.samples), []
    for value in call.tensors:
        # Mean and 1 / deviation [N, ..., 1] are cut like the input. Weight and bias have fewer dimensions.
        batched = value.meta.dim() == x.meta.dim() and value.meta.shape[shard.dim] == rows
        operands.append(Operand(value, shard if batched else REPLICATE))
    sums = len(_results(call)) - 1  # gradients of weight and bias, which are sums over the samples
    plain = run_of(call)

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        # The kernel assumes contiguous tensors, but rows cut from several outer blocks are strided.
        return plain(microbatch, [tensor.contiguous() for tensor in tensors])

    return OpStrategy(operands, [shard] + [PARTIAL] * sums, run)


def _group_norm(call: Call) -> OpStrategy | None:
    """Rule for group normalisation, which takes the number of samples as an argument."""
    x = call.tensors[0]
    if x.shard is None or x.shard.dim != 0 or any(other.shard is not None for other in call.tensors[1:]):
        return None
    operands = [Operand(x, x.shard), *(Operand(other, REPLICATE) for other in call.tensors[1:])]
    return OpStrategy(operands, [x.shard] * 3, _with_rows(call, x.shard))


def _group_norm_backward(call: Call) -> OpStrategy | None:
    shard = call.tensors[1].shard or call.tensors[0].shard
    if shard is None or shard.dim != 0 or any(other.shard is not None for other in call.tensors[4:]):
        return None
    operands = [Operand(value, shard) for value in call.tensors[:4]]
    operands += [Operand(other, REPLICATE) for other in call.tensors[4:]]
    return OpStrategy(operands, [shard, PARTIAL, PARTIAL], _with_rows(call, shard))


def _with_rows(call: Call, shard: Shard) -> Run:
    """Return the function that runs the call with the number of the micro-batch's rows as argument N."""
    position = next(i for i, argument in enumerate(call.func._schema.arguments) if argument.name == "N")

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        args = list(call.args)
        args[position] = shard.rows(microbatch.samples)
        args, kwargs = substituted(tuple(args), call.kwargs, call.paths, tensors)
        return call.func(*args, **kwargs)

    return with_kernel_strides(call.func, [value.meta for value in call.tensors], run)


RULES: dict[Any, Callable[[Call], OpStrategy | None]] = {
    aten.native_layer_norm: _layer_norm,
    aten.native_group_norm: _group_norm,
    aten.native_group_norm_backward: _group_norm_backward,
    operator("_fused_rms_norm"): _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    operator("_fused_rms_norm_backward"): _layer_norm_backward,
}
