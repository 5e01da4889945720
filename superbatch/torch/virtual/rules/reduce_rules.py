"""Rules for operators along given dimensions: sums, extremes, moments, softmax, sorting.

Along features they act on each sample. Along the samples, sums and extremes are combined from micro-batches.
Other operators along the samples have no rule: they are decomposed, or their inputs are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, OpStrategy, run_of
from ..ir.matrices import leading_alike
from ..ir.reductions import Extremes, Folded, Moments, Sums
from ..ir.shard import PARTIAL, REPLICATE, BatchSlice, Shard
from ..ir.values import Operand, Value

aten: Any = torch.ops.aten


def _dims(call: Call, name: str = "dim") -> set[int]:
    """Return the dimensions along which the operator acts, none negative."""
    value: Value = call.tensors[0]
    named = call.argument(name)
    if named is None or (isinstance(named, (list, tuple)) and not named):  # dim=[] means all
        return set(range(value.meta.dim()))
    return {
        dim % max(value.meta.dim(), 1) for dim in (named if isinstance(named, (list, tuple)) else [named])
    }


def _after(shard: Shard, dims: set[int], keep: bool) -> Shard:
    """Return the sharding of a result from which `dims` are removed; with `keep` they have size 1 instead."""
    return shard if keep else shard.at(shard.dim - sum(dim < shard.dim for dim in dims))


def _reduction(reduce: Callable[[], Any]) -> Callable[[Call], OpStrategy | None]:
    def rule(call: Call) -> OpStrategy | None:
        value = call.tensors[0]
        if value.shard is None or len(call.tensors) > 1:
            return None
        # Overloads without the argument, such as max.default, reduce all dimensions.
        dims = _dims(call) if call.argument("dim") is not None else set(range(value.meta.dim()))
        operands = [Operand(value, value.shard)]
        # Along the samples, `reduce` combines the results of micro-batches.
        if value.shard.dim in dims:
            return OpStrategy(operands, [PARTIAL], run_of(call), reduce)
        output = _after(value.shard, dims, bool(call.argument("keepdim", False)))
        return OpStrategy(operands, [output], run_of(call))

    return rule


def _per_sample(outputs: int = 1, name: str = "dim") -> Callable[[Call], OpStrategy | None]:
    """Return the rule of an operator along features that does not change the shape of its input."""

    def rule(call: Call) -> OpStrategy | None:
        first = next((value for value in call.tensors if value.shard is not None), None)
        # Along the samples a micro-batch would need the others, so there is no rule.
        if first is None or first.shard is None or first.shard.dim in _dims(call, name):
            return None
        return _all_alike(call, first.shard, [first.shard] * outputs)

    return rule


def _renorm(call: Call) -> OpStrategy | None:
    """Rule for renorm along the samples, which limits the norm of each sample separately."""
    (x,) = call.tensors
    if x.shard is None or x.shard.dim not in _dims(call):
        return None
    return OpStrategy([Operand(x, x.shard)], [x.shard], run_of(call))


def _all_alike(call: Call, shard: Shard, outputs: list[Shard | None]) -> OpStrategy | None:
    """Return a strategy that cuts every tensor in the same dimension; None if their sizes differ there."""
    rows = shard.rows(call.samples)
    for value in call.tensors:
        if value.meta.dim() <= shard.dim or value.meta.shape[shard.dim] != rows:
            return None
    return OpStrategy([Operand(value, shard) for value in call.tensors], outputs, run_of(call))


def _within_samples(outputs: int) -> Callable[[Call], OpStrategy | None]:
    """Return the rule of a reduction that is possible along features only."""

    def rule(call: Call) -> OpStrategy | None:
        value, dims = call.tensors[0], _dims(call)
        if value.shard is None or value.shard.dim in dims:
            return None
        output = _after(value.shard, dims, bool(call.argument("keepdim", False)))
        return OpStrategy([Operand(value, value.shard)], [output] * outputs, run_of(call))

    return rule


def _moments(call: Call) -> OpStrategy | None:
    """Rule for var, std, var_mean and std_mean."""
    value, dims = call.tensors[0], _dims(call)
    with_mean = call.func.overloadpacket in (aten.var_mean, aten.std_mean)
    if value.shard is None:
        return None
    keep = bool(call.argument("keepdim", False))
    if value.shard.dim not in dims:
        output = _after(value.shard, dims, keep)
        return OpStrategy([Operand(value, value.shard)], [output] * (1 + with_mean), run_of(call))
    correction = call.argument("correction")
    if correction is None:  # older overloads have `unbiased`, which is True by default
        correction = 1 if call.argument("unbiased", True) else 0
    root = call.func.overloadpacket in (aten.std, aten.std_mean)
    along = sorted(dims)
    half = value.meta.dtype in (torch.float16, torch.bfloat16)

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        x = tensors[0].float() if half else tensors[0]  # rounded to 16 bits once, in `finish`
        count = math.prod(x.shape[dim] for dim in along)
        variance, mean = torch.var_mean(x, along, correction=0, keepdim=keep)
        moments = (mean, variance * count, count)
        # `Moments` computes both results from the first output.
        return (moments, None) if with_mean else moments

    def finish(mean: Tensor, squares: Tensor, count: int) -> list[Tensor]:
        variance = squares / max(count - correction, 0)  # NaN for a single number, as in torch
        results = [variance.sqrt() if root else variance, *([mean] if with_mean else [])]
        return [tensor.to(value.meta.dtype) for tensor in results] if half else results

    return OpStrategy(
        [Operand(value, value.shard)], [PARTIAL] * (1 + with_mean), run, lambda: Moments(finish)
    )


def _vector_norm(call: Call) -> OpStrategy | None:
    value, dims = call.tensors[0], _dims(call)
    if value.shard is None or value.shard.dim in dims:
        return None  # along the samples it is decomposed into a sum of powers, which has a rule
    output = _after(value.shard, dims, bool(call.argument("keepdim", False)))
    return OpStrategy([Operand(value, value.shard)], [output], run_of(call))


# -- operators that take shapes as arguments -----------------------------------------------------------------


def _constant_pad(call: Call) -> OpStrategy | None:
    x = call.tensors[0]
    # `pad` has two numbers for each padded dimension, starting with the last dimension.
    if x.shard is None or x.shard.dim >= x.meta.dim() - len(call.argument("pad")) // 2:
        return None
    return OpStrategy([Operand(x, x.shard)], [x.shard], run_of(call))


def _upsample_backward(call: Call) -> OpStrategy | None:
    """Rule for backwards of upsampling, which take the shape of the forward's input as an argument."""
    grad = call.tensors[0]
    if grad.shard is None or grad.shard.dim != 0:
        return None
    shard = grad.shard
    size = list(call.argument("input_size"))

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        args, kwargs = call.replaced(input_size=[shard.rows(microbatch.samples), *size[1:]])
        return call.func(tensors[0], *args[1:], **kwargs)

    return OpStrategy([Operand(grad, shard)], [shard], run)


def _last_dims(count: int, outputs: int = 1) -> Callable[[Call], OpStrategy | None]:
    """Return the rule of a function of the last `count` dimensions, such as the inverse of matrices."""

    def rule(call: Call) -> OpStrategy | None:
        first = next((value for value in call.tensors if value.shard is not None), None)
        if first is None or first.shard is None or first.shard.dim >= first.meta.dim() - count:
            return None
        # Leading dimensions that are broadcast may have the samples at different positions.
        return _all_alike(call, first.shard, [first.shard] * outputs) if leading_alike(call) else None

    return rule


def _images(dims: int) -> Callable[[Call], OpStrategy | None]:
    """Return the rule of an operator on images, with `dims` dimensions including that of the samples."""

    def rule(call: Call) -> OpStrategy | None:
        (x,) = call.tensors
        # With one dimension less, the operator takes dimension 0 for the channels of a single image.
        if x.shard is None or x.shard.dim != 0 or x.meta.dim() != dims:
            return None
        return OpStrategy([Operand(x, x.shard)], [x.shard], run_of(call))

    return rule


def _addmm(call: Call) -> OpStrategy | None:
    """Rule for rows times a matrix, plus one row for all samples or one row per sample."""
    added, rows, matrix = call.tensors
    shard = rows.shard
    if shard is None or shard.dim != 0:
        return None
    per_sample = added.meta.dim() == 2 and added.meta.shape[0] == shard.rows(call.samples)
    operands = [
        Operand(added, shard if per_sample else REPLICATE),
        Operand(rows, shard),
        Operand(matrix, REPLICATE),
    ]
    return OpStrategy(operands, [shard], run_of(call))


def _both_extremes(call: Call) -> OpStrategy | None:
    """Rule for aminmax."""
    x, dim = call.tensors[0], call.argument("dim")
    if x.shard is None:
        return None
    dims = set(range(x.meta.dim())) if dim is None else {dim % max(x.meta.dim(), 1)}
    if x.shard.dim in dims:
        return OpStrategy([Operand(x, x.shard)], [PARTIAL, PARTIAL], run_of(call), Extremes)
    output = _after(x.shard, dims, bool(call.argument("keepdim", False)))
    return OpStrategy([Operand(x, x.shard)], [output] * 2, run_of(call))


def _argument_extreme(call: Call) -> OpStrategy | None:
    value = call.tensors[0]
    dim = call.argument("dim")
    # Along the samples the result is the index of a sample, which each micro-batch would count from 0.
    if value.shard is None or dim is None or dim % value.meta.dim() == value.shard.dim:
        return None
    output = _after(value.shard, _dims(call), bool(call.argument("keepdim", False)))
    return OpStrategy([Operand(value, value.shard)], [output], run_of(call))


_MAXIMUM, _MINIMUM = lambda: Folded(torch.maximum), lambda: Folded(torch.minimum)

# Functions of matrices [..., n, m], with the number of their results.
_MATRICES = {
    "_linalg_det": 3,
    "_linalg_eigh": 2,
    "_linalg_slogdet": 4,
    "_linalg_solve_ex": 4,
    "_linalg_svd": 3,
    "cholesky_inverse": 1,
    "cholesky_solve": 1,
    "linalg_cholesky_ex": 2,
    "linalg_eig": 2,
    "linalg_householder_product": 1,
    "linalg_inv_ex": 2,
    "linalg_lu": 3,
    "linalg_lu_factor_ex": 3,
    "linalg_lu_solve": 1,
    "linalg_matrix_exp": 1,
    "linalg_qr": 2,
    "linalg_solve_triangular": 1,
    "lu_unpack": 3,
}

RULES: dict[Any, Callable[[Call], OpStrategy | None]] = {
    aten.sum: _reduction(Sums),
    aten.nansum: _reduction(Sums),
    aten.count_nonzero: _reduction(Sums),
    aten.amax: _reduction(_MAXIMUM),
    aten.amin: _reduction(_MINIMUM),
    aten.max.default: _reduction(_MAXIMUM),
    aten.min.default: _reduction(_MINIMUM),
    aten.prod: _reduction(lambda: Folded(torch.mul)),
    aten.any: _reduction(lambda: Folded(torch.logical_or)),
    aten.all: _reduction(lambda: Folded(torch.logical_and)),
    aten.mean: _within_samples(1),  # `trace.composites` computes a mean over samples from a sum
    aten.max.dim: _within_samples(2),
    aten.min.dim: _within_samples(2),
    aten.median.dim: _within_samples(2),
    aten.nanmedian.dim: _within_samples(2),
    aten.mode: _within_samples(2),
    aten.kthvalue: _within_samples(2),
    aten.var.correction: _moments,
    aten.std.correction: _moments,
    aten.var_mean.correction: _moments,
    aten.std_mean.correction: _moments,
    aten.linalg_vector_norm: _vector_norm,
    aten._softmax: _per_sample(),
    aten._log_softmax: _per_sample(),
    aten._safe_softmax: _per_sample(),
    aten._softmax_backward_data: _per_sample(),
    aten._log_softmax_backward_data: _per_sample(),
    # No rule along the samples, because each sample needs the result of the one before.
    aten.cumsum: _per_sample(),
    aten.cumprod: _per_sample(),
    aten.logcumsumexp: _per_sample(),
    aten.cummax: _per_sample(2),
    aten.cummin: _per_sample(2),
    aten.sort: _per_sample(2),
    aten.topk: _per_sample(2),
    aten.flip: _per_sample(name="dims"),
    aten.roll: _per_sample(name="dims"),
    aten.glu: _per_sample(),
    aten.glu_backward: _per_sample(),
    aten.renorm: _renorm,
    aten.aminmax: _both_extremes,
    aten._aminmax: _both_extremes,
    aten.addmm: _addmm,
    aten.im2col: _images(4),
    aten.col2im: _images(3),
    aten.pixel_shuffle: _images(4),
    aten.pixel_unshuffle: _images(4),
    aten.channel_shuffle: _images(4),
    **{
        getattr(aten, name): _last_dims(2, outputs)
        for name, outputs in _MATRICES.items()
        if hasattr(aten, name)
    },
    aten.tril: _last_dims(2),
    aten.triu: _last_dims(2),
    aten._fft_r2c: _per_sample(),
    aten._fft_c2r: _per_sample(),
    aten._fft_c2c: _per_sample(),
    aten.constant_pad_nd: _constant_pad,
    aten.upsample_nearest1d_backward: _upsample_backward,
    aten.upsample_nearest2d_backward: _upsample_backward,
    aten.upsample_nearest3d_backward: _upsample_backward,
    aten._upsample_nearest_exact1d_backward: _upsample_backward,
    aten._upsample_nearest_exact2d_backward: _upsample_backward,
    aten._upsample_nearest_exact3d_backward: _upsample_backward,
    aten._upsample_bilinear2d_aa_backward: _upsample_backward,
    aten._upsample_bicubic2d_aa_backward: _upsample_backward,
    aten.upsample_linear1d_backward: _upsample_backward,
    aten.upsample_bilinear2d_backward: _upsample_backward,
    aten.upsample_trilinear3d_backward: _upsample_backward,
    aten.upsample_bicubic2d_backward: _upsample_backward,
    aten.argmax: _argument_extreme,
    aten.argmin: _argument_extreme,
}
