"""Rules for losses, distances and embeddings, each with its own convention for the batch dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, OpStrategy, run_of, shapes
from ..ir.reductions import First, Sums
from ..ir.shard import PARTIAL, REPLICATE, BatchSlice, Shard
from ..ir.values import Operand, Value

aten: Any = torch.ops.aten
_MEAN, _SUM = 1, 2  # values of the argument `reduction`


def _rows_of(value: Value, shard: Shard, samples: int) -> bool:
    return value.meta.dim() > shard.dim and value.meta.shape[shard.dim] == shard.rows(samples)


def _nll_loss_forward(call: Call) -> OpStrategy | None:
    """Rule for nll_loss_forward, except a mean: `trace.composites` computes that from the sum."""
    x, target = call.tensors[:2]
    if x.shard is None or x.shard.dim != 0:
        return None
    reduction = call.argument("reduction")
    rows = x.shard.rows(call.samples)
    if target.meta.shape[:1] != (rows,) or (target.shard is not None and target.shard != x.shard):
        return None
    if any(value.shard is not None for value in call.tensors[2:]) or reduction == _MEAN:
        return None
    operands = [
        Operand(x, x.shard),
        Operand(target, x.shard),
        *(Operand(w, REPLICATE) for w in call.tensors[2:]),
    ]
    if reduction == 0:  # without a reduction the sum of weights is 0 in every micro-batch
        return OpStrategy(operands, [x.shard, PARTIAL], run_of(call), First)
    return OpStrategy(operands, [PARTIAL, PARTIAL], run_of(call))


def _nll_loss_backward(call: Call) -> OpStrategy | None:
    """Rule for classes that are samples, as in ``cross_entropy(logits.T, labels)``."""
    grad, x, target, *others = call.tensors
    shard = x.shard
    if shard is None or shard != Shard(1) or x.meta.dim() != 2:
        return None  # for samples in dimension 0 the table has a row
    reduction, ignored = call.argument("reduction"), call.argument("ignore_index")
    dtype, weighted = x.meta.dtype, len(others) > 1

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        grad, target, *others = tensors
        # x is [rows, classes], and the micro-batch is some of the classes.
        classes = torch.arange(microbatch.start, microbatch.stop, device=target.device)
        slope = -grad / others[-1] if reduction == _MEAN else -grad
        slope = slope[:, None] if slope.dim() else slope  # [rows, 1], or a scalar for all rows
        slope = slope * others[0][microbatch.start : microbatch.stop] if weighted else slope
        if ignored >= 0:
            target = torch.where(target == ignored, -1, target)  # -1 equals no class
        return torch.where(target[:, None] == classes, slope, 0).to(dtype)

    # x is no operand, because the gradient does not depend on its numbers.
    return OpStrategy(
        [Operand(v, REPLICATE) for v in (grad, target, *others)],
        [shard],
        run,
        light=True,
        reads_position=True,
    )


# -- losses with a margin -----------------------------------------------------------------------------------


def _margin_shard(call: Call, x: Value, target: Value) -> Shard | None:
    """Return the sharding of rows [N, C]; None if the samples are not in dimension 0 of two dimensions."""
    shard = x.shard or target.shard
    if shard is None or shard.dim != 0 or x.meta.dim() != 2:
        return None
    return shard if all(_rows_of(value, shard, call.samples) for value in (x, target)) else None


def _margin_loss(call: Call) -> OpStrategy | None:
    """Rule for multi_margin_loss and multilabel_margin_loss_forward."""
    x, target = call.tensors[:2]
    shard = _margin_shard(call, x, target)
    if shard is None:
        return None
    reduction, rows = call.argument("reduction", _MEAN), shard.rows(call.samples)
    # A mean is the sum divided by all rows: the kernel would divide by those of the micro-batch.
    args, kwargs = call.replaced(reduction=_SUM) if reduction == _MEAN else (call.args, call.kwargs)
    run = run_of(call, args, kwargs)
    several = len(call.func._schema.returns) > 1

    def mean(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        result = run(microbatch, tensors)
        return (result[0] / rows, *result[1:]) if several else result / rows

    outputs = [shard if reduction == 0 else PARTIAL, *([shard] if several else [])]
    operands = [Operand(v, shard if v is x or v is target else REPLICATE) for v in call.tensors]
    return OpStrategy(operands, outputs, mean if reduction == _MEAN else run)


def _margin_loss_backward(call: Call) -> OpStrategy | None:
    grad, x, target, *others = call.tensors
    shard = _margin_shard(call, x, target)
    if shard is None:
        return None
    reduction, rows = call.argument("reduction", _MEAN), shard.rows(call.samples)
    args, kwargs = call.replaced(reduction=_SUM) if reduction == _MEAN else (call.args, call.kwargs)
    run = run_of(call, args, kwargs)

    def mean(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        return run(microbatch, tensors) / rows

    # `others` is `is_target`, [N, C], of a multilabel loss, and otherwise the weights of the classes.
    several = call.func.overloadpacket is aten.multilabel_margin_loss_backward
    operands = [
        Operand(grad, shard if reduction == 0 else REPLICATE),
        Operand(x, shard),
        Operand(target, shard),
    ]
    operands += [Operand(v, shard if several else REPLICATE) for v in others]
    return OpStrategy(operands, [shard], mean if reduction == _MEAN else run)


# -- kernels whose saved state is recomputed in the backward ------------------------------------------------


def _log_sigmoid_forward(call: Call) -> OpStrategy | None:
    (x,) = call.tensors
    if x.shard is None:
        return None
    run = run_of(call)

    def output(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        result, buffer = run(microbatch, tensors)
        return result, buffer if buffer.shape == result.shape else result  # on CUDA the buffer is empty

    return OpStrategy([Operand(x, x.shard)], [x.shard] * 2, output, light=True)


def _log_sigmoid_backward(call: Call) -> OpStrategy | None:
    grad, x = call.tensors[:2]
    shard = x.shard or grad.shard
    if shard is None:
        return None

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        grad, x = tensors
        # Recomputed, because the saved buffer is a placeholder after a forward on CUDA.
        return aten.log_sigmoid_backward(grad, x, aten.log_sigmoid_forward(x)[1])

    return OpStrategy([Operand(grad, shard), Operand(x, shard)], [shard], run, light=True)


class _Ctc:
    """Arguments of a CTC loss: log-probabilities [T, N, C], targets [N, S], lists or tensors of lengths."""

    def __init__(self, call: Call, skip: int) -> None:
        self.call = call
        self.main = call.tensors[skip : skip + 2]
        lengths = [call.argument(name) for name in ("input_lengths", "target_lengths")]
        self.lengths: list[Any] = lengths
        self.blank = call.argument("blank", 0)
        self.infinite = call.argument("zero_infinity", False)

    def operands(self) -> tuple[Shard, list[Operand]] | None:
        """Return sharding and operands; None for concatenated targets, or samples outside of dimension 1."""
        probabilities, targets = self.main
        shard = probabilities.shard
        if shard is None or shard != Shard(1) or probabilities.meta.dim() != 3 or targets.meta.dim() != 2:
            return None
        main = [Operand(probabilities, Shard(1)), Operand(targets, Shard(0))]
        return shard, [*main, *(Operand(v, Shard(0)) for v in self.lengths if isinstance(v, Value))]

    def forward(self, microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        """Return the loss and the kernel's table `log_alpha` of a micro-batch."""
        return aten._ctc_loss(*tensors[:2], *self.cut(microbatch, tensors), self.blank, self.infinite)

    def cut(self, microbatch: BatchSlice, tensors: list[Tensor]) -> list[Any]:
        """Return the lengths of a micro-batch."""
        # Tensors are operands, which are cut already. Lists are arguments of the call, for all samples.
        if isinstance(self.lengths[0], Value):
            return tensors[2:4]
        return [list(lengths)[microbatch.start : microbatch.stop] for lengths in self.lengths]


def _ctc_loss(call: Call) -> OpStrategy | None:
    ctc = _Ctc(call, 0)
    sharded = ctc.operands()
    if sharded is None:
        return None
    width = 2 * ctc.main[1].meta.shape[1] + 1

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        loss, table = ctc.forward(microbatch, tensors)
        # The table is as wide as the longest target of the micro-batch; all get the width for the batch.
        return loss, torch.nn.functional.pad(table, (0, width - table.shape[-1]))

    return OpStrategy(sharded[1], [Shard(0), Shard(0)], run, reads_position=True)


def _ctc_loss_backward(call: Call) -> OpStrategy | None:
    ctc = _Ctc(call, 1)
    sharded = ctc.operands()
    if sharded is None:
        return None
    shard, operands = sharded

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        grad, *inputs = tensors
        # The backward kernel needs the table of these samples alone, without padding.
        loss, table = ctc.forward(microbatch, inputs)
        lengths = ctc.cut(microbatch, inputs)
        return aten._ctc_loss_backward(grad, *inputs[:2], *lengths, loss, table, ctc.blank, ctc.infinite)

    return OpStrategy([Operand(call.tensors[0], Shard(0)), *operands], [shard], run, reads_position=True)


# -- distances ----------------------------------------------------------------------------------------------


def _distances(call: Call) -> OpStrategy | None:
    """Rule for cdist, the distances between the rows of two tensors for each leading index."""
    strategy = _leading_alike(call, run_of(call))
    if strategy is not None:
        return strategy
    first, second = call.tensors[:2]
    shard, dims = first.shard, max(first.meta.dim(), second.meta.dim())
    if shard is not None and shard.dim == first.meta.dim() - 2:
        return OpStrategy(
            [Operand(first, shard), Operand(second, REPLICATE)], [shard.at(dims - 2)], run_of(call)
        )
    # The second tensor is sharded: each micro-batch computes some columns of the distances.
    shard = second.shard
    if shard is not None and first.shard is None and shard.dim == second.meta.dim() - 2:
        operands = [Operand(first, REPLICATE), Operand(second, shard)]
        return OpStrategy(operands, [shard.at(dims - 1)], run_of(call))
    return None


def _distances_backward(call: Call) -> OpStrategy | None:
    """Rule for the gradient of the first tensor, from (grad, first, second, distances)."""
    run = _dense(run_of(call))
    strategy = _leading_alike(call, run)
    if strategy is not None:
        return strategy
    grad, first, second, distances = call.tensors
    if grad.meta.dim() != 2 or first.meta.dim() != 2 or second.meta.dim() != 2:
        return None
    if first.shard is not None and first.shard.dim == 0:
        shard = first.shard
        operands = [Operand(grad, shard), Operand(first, shard), Operand(second, REPLICATE)]
        return OpStrategy([*operands, Operand(distances, shard)], [shard], run)
    if second.shard is not None and first.shard is None and second.shard.dim == 0:
        columns = second.shard.at(1)  # the gradient of a row is a sum over the rows of the second tensor
        operands = [Operand(grad, columns), Operand(first, REPLICATE), Operand(second, second.shard)]
        return OpStrategy([*operands, Operand(distances, columns)], [PARTIAL], run, Sums)
    return None


def _leading_alike(call: Call, run: Callable[[BatchSlice, list[Tensor]], Any]) -> OpStrategy | None:
    """Return a strategy for samples in a dimension before those of the matrices; None for others."""
    leading = [(v.shard, v.shard.dim - v.meta.dim()) for v in call.tensors if v.shard is not None]
    # Positions from the right, where broadcasting aligns dimensions; -2 and -1 are those of the matrix.
    positions = {(shard[1:], position) for shard, position in leading if position < -2}
    if len(positions) != 1:
        return None
    ((_, from_end),) = positions
    shard = leading[0][0]
    operands = []
    for value in call.tensors:
        dim = value.meta.dim() + from_end
        if dim < 0 or value.meta.shape[dim] == 1 != shard.rows(call.samples):
            operands.append(Operand(value, REPLICATE))
        elif value.meta.shape[dim] == shard.rows(call.samples):
            operands.append(Operand(value, shard.at(dim)))
        else:
            return None
    output = shapes(call)
    dim = output.dim() + from_end
    sharded = dim >= 0 and output.shape[dim] == shard.rows(call.samples)
    return OpStrategy(operands, [shard.at(dim) if sharded else PARTIAL], run)


def _dense(run: Callable[[BatchSlice, list[Tensor]], Any]) -> Callable[[BatchSlice, list[Tensor]], Any]:
    # The kernel ignores strides and assumes row-major order.
    return lambda microbatch, tensors: run(microbatch, [tensor.contiguous() for tensor in tensors])


# -- embeddings and bilinear layers -------------------------------------------------------------------------


def _embedding_backward(call: Call) -> OpStrategy | None:
    """Rule for the gradient of an embedding table: a sum over the samples."""
    grad, index = call.tensors
    shard = grad.shard or index.shard
    if shard is None or call.argument("scale_grad_by_freq", False):
        return None  # scale_grad_by_freq counts each row in the whole batch
    if not all(_rows_of(value, shard, call.samples) for value in (grad, index)):
        return None
    return OpStrategy([Operand(grad, shard), Operand(index, shard)], [PARTIAL], run_of(call))


def _trilinear(call: Call) -> OpStrategy | None:
    """Rule for bilinear layers: a product of three expanded tensors, summed over some dimensions."""
    expands = [call.argument(f"expand{number}") for number in (1, 2, 3)]
    count = call.tensors[0].meta.dim() + len(expands[0])
    # For each tensor, the positions of its dimensions among the `count` dimensions of the product.
    own = [[dim for dim in range(count) if dim not in expand] for expand in expands]
    shards = {
        dims[value.shard.dim]: value.shard
        for value, dims in zip(call.tensors, own, strict=True)
        if value.shard is not None
    }
    if len(shards) != 1:
        return None
    ((position, shard),) = shards.items()
    operands = []
    for value, dims in zip(call.tensors, own, strict=True):
        placement = shard.at(dims.index(position)) if position in dims else REPLICATE
        if placement is not None and not _rows_of(value, placement, call.samples):
            return None
        operands.append(Operand(value, placement))
    summed = [dim % count for dim in call.argument("sumdim")]
    output = PARTIAL if position in summed else shard.at(position - sum(dim < position for dim in summed))
    return OpStrategy(operands, [output], run_of(call))


RULES: dict[Any, Callable[[Call], OpStrategy | None]] = {
    aten.nll_loss_forward: _nll_loss_forward,
    aten.nll_loss2d_forward: _nll_loss_forward,
    aten.nll_loss_backward: _nll_loss_backward,
    aten.multi_margin_loss: _margin_loss,
    aten.multi_margin_loss_backward: _margin_loss_backward,
    aten.multilabel_margin_loss_forward: _margin_loss,
    aten.multilabel_margin_loss_backward: _margin_loss_backward,
    aten.log_sigmoid_forward: _log_sigmoid_forward,
    aten.log_sigmoid_backward: _log_sigmoid_backward,
    aten._ctc_loss: _ctc_loss,
    aten._ctc_loss_backward: _ctc_loss_backward,
    aten._cdist_forward: _distances,
    aten._cdist_backward: _distances_backward,
    aten.embedding_dense_backward: _embedding_backward,
    aten._trilinear: _trilinear,
}
