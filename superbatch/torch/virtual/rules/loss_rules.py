"""Rules for losses, distances and lookups, each with its own convention for the batch dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, OpStrategy, filled, shapes
from ..ir.reductions import First, Sums
from ..ir.shard import Part, Shard
from ..ir.values import Operand, Value

aten: Any = torch.ops.aten
_MEAN, _SUM = 1, 2  # of `reduction`


def _rows_of(value: Value, shard: Shard, samples: int) -> bool:
    return value.meta.dim() > shard.dim and value.meta.shape[shard.dim] == shard.rows(samples)


def _nll_loss_forward(call: Call) -> OpStrategy | None:
    """Rule for (loss, sum of weights); a composite makes means of sums (see `trace.composites`)."""
    x, target = call.tensors[:2]
    if x.shard is None or x.shard.dim != 0:
        return None
    reduction = call.argument("reduction")
    rows = x.shard.rows(call.samples)
    if target.meta.shape[:1] != (rows,) or (target.shard is not None and target.shard != x.shard):
        return None
    if any(value.shard is not None for value in call.tensors[2:]) or reduction == 1:
        return None
    operands = [
        Operand(x, x.shard),
        Operand(target, x.shard),
        *(Operand(w, None) for w in call.tensors[2:]),
    ]
    if reduction == 0:  # the sum of weights is 0 without a reduction, in every micro-batch
        return OpStrategy(operands, [x.shard, None], filled(call), First)
    return OpStrategy(operands, [None, None], filled(call))


def _nll_loss_backward(call: Call) -> OpStrategy | None:
    """Rule for classes that are samples, as in ``cross_entropy(logits.T, labels)``."""
    grad, x, target, *others = call.tensors
    shard = x.shard
    if shard is None or shard != Shard(1) or x.meta.dim() != 2:
        return None  # samples in dimension 0: a row of the table
    reduction, ignored = call.argument("reduction"), call.argument("ignore_index")
    dtype, weighted = x.meta.dtype, len(others) > 1

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        grad, target, *others = tensors
        # x is [rows, classes], and the micro-batch has some of the classes.
        classes = torch.arange(part.start, part.stop, device=target.device)
        share = -grad / others[-1] if reduction == _MEAN else -grad
        share = share[:, None] if share.dim() else share  # [rows, 1], or a scalar for all rows
        share = share * others[0][part.start : part.stop] if weighted else share
        if ignored >= 0:
            target = torch.where(target == ignored, -1, target)  # -1 equals no class
        return torch.where(target[:, None] == classes, share, 0).to(dtype)

    # The gradient does not depend on the numbers of x, so x is no operand.
    return OpStrategy(
        [Operand(v, None) for v in (grad, target, *others)], [shard], run, light=True, placed=True
    )


# -- losses with a margin -----------------------------------------------------------------------------------


def _of_margins(call: Call, x: Value, target: Value) -> Shard | None:
    """Return the sharding if each sample is one row [N, C]; None for one dimension, which is a single row."""
    shard = x.shard or target.shard
    if shard is None or shard.dim != 0 or x.meta.dim() != 2:
        return None
    return shard if all(_rows_of(value, shard, call.samples) for value in (x, target)) else None


def _margin_loss(call: Call) -> OpStrategy | None:
    """Rule for multi_margin_loss and multilabel_margin_loss_forward: a mean is the sum over all rows / N."""
    x, target = call.tensors[:2]
    shard = _of_margins(call, x, target)
    if shard is None:
        return None
    reduction, rows = call.argument("reduction", _MEAN), shard.rows(call.samples)
    # The kernel would divide by the rows of the micro-batch.
    args, kwargs = call.replaced(reduction=_SUM) if reduction == _MEAN else (call.args, call.kwargs)
    run = filled(call, args, kwargs)
    several = len(call.func._schema.returns) > 1

    def mean(part: Part, tensors: list[Tensor]) -> Any:
        found = run(part, tensors)
        return (found[0] / rows, *found[1:]) if several else found / rows

    outputs = [shard if reduction == 0 else None, *([shard] if several else [])]
    operands = [Operand(v, shard if v is x or v is target else None) for v in call.tensors]
    return OpStrategy(operands, outputs, mean if reduction == _MEAN else run)


def _margin_loss_backward(call: Call) -> OpStrategy | None:
    grad, x, target, *others = call.tensors
    shard = _of_margins(call, x, target)
    if shard is None:
        return None
    reduction, rows = call.argument("reduction", _MEAN), shard.rows(call.samples)
    args, kwargs = call.replaced(reduction=_SUM) if reduction == _MEAN else (call.args, call.kwargs)
    run = filled(call, args, kwargs)

    def mean(part: Part, tensors: list[Tensor]) -> Any:
        return run(part, tensors) / rows

    several = call.func.overloadpacket is aten.multilabel_margin_loss_backward  # others: `is_target`, [N, C]
    operands = [
        Operand(grad, shard if reduction == 0 else None),
        Operand(x, shard),
        Operand(target, shard),
    ]
    operands += [Operand(v, shard if several else None) for v in others]
    return OpStrategy(operands, [shard], mean if reduction == _MEAN else run)


# -- kernels whose saved state the backward recomputes -----------------------------------------------------


def _log_sigmoid_forward(call: Call) -> OpStrategy | None:
    (x,) = call.tensors
    if x.shard is None:
        return None
    run = filled(call)

    def output(part: Part, tensors: list[Tensor]) -> Any:
        found, kept = run(part, tensors)
        return found, kept if kept.shape == found.shape else found  # on CUDA the saved buffer is empty

    return OpStrategy([Operand(x, x.shard)], [x.shard] * 2, output, light=True)


def _log_sigmoid_backward(call: Call) -> OpStrategy | None:
    grad, x = call.tensors[:2]
    shard = x.shard or grad.shard
    if shard is None:
        return None

    def run(part: Part, tensors: list[Tensor]) -> Any:
        grad, x = tensors
        # The saved buffer may have the form of another device or be a placeholder: it is computed again.
        return aten.log_sigmoid_backward(grad, x, aten.log_sigmoid_forward(x)[1])

    return OpStrategy([Operand(grad, shard), Operand(x, shard)], [shard], run, light=True)


class _Ctc:
    """CTC loss: log-probabilities [T, N, C], targets [N, S], lengths as lists or as tensors [N]."""

    def __init__(self, call: Call, skip: int) -> None:
        self.call = call
        self.main = call.tensors[skip : skip + 2]
        lengths = [call.argument(name) for name in ("input_lengths", "target_lengths")]
        self.lengths: list[Any] = lengths
        self.blank = call.argument("blank", 0)
        self.infinite = call.argument("zero_infinity", False)

    def operands(self) -> tuple[Shard, list[Operand]] | None:
        """Return sharding and operands; None for concatenated targets, or samples in another dimension."""
        probabilities, targets = self.main
        shard = probabilities.shard
        if shard is None or shard != Shard(1) or probabilities.meta.dim() != 3 or targets.meta.dim() != 2:
            return None
        found = [Operand(probabilities, Shard(1)), Operand(targets, Shard(0))]
        return shard, [*found, *(Operand(v, Shard(0)) for v in self.lengths if isinstance(v, Value))]

    def forward(self, part: Part, tensors: list[Tensor]) -> Any:
        """Return the loss and the kernel's alpha table of a micro-batch."""
        return aten._ctc_loss(*tensors[:2], *self.cut(part, tensors), self.blank, self.infinite)

    def cut(self, part: Part, tensors: list[Tensor]) -> list[Any]:
        """Return the lengths of a micro-batch."""
        # Tensors were cut as operands; lists are arguments of the call, of all samples.
        if isinstance(self.lengths[0], Value):
            return tensors[2:4]
        return [list(lengths)[part.start : part.stop] for lengths in self.lengths]


def _ctc_loss(call: Call) -> OpStrategy | None:
    ctc = _Ctc(call, 0)
    found = ctc.operands()
    if found is None:
        return None
    width = 2 * ctc.main[1].meta.shape[1] + 1

    def run(part: Part, tensors: list[Tensor]) -> Any:
        loss, table = ctc.forward(part, tensors)
        # As wide as the longest target of the micro-batch: padded, for the rows of all are joined.
        return loss, torch.nn.functional.pad(table, (0, width - table.shape[-1]))

    return OpStrategy(found[1], [Shard(0), Shard(0)], run, placed=True)


def _ctc_loss_backward(call: Call) -> OpStrategy | None:
    ctc = _Ctc(call, 1)
    found = ctc.operands()
    if found is None:
        return None
    shard, operands = found

    def run(part: Part, tensors: list[Tensor]) -> Any:
        grad, *given = tensors
        # Run again: the backward kernel needs the table of exactly these samples, not the padded one.
        loss, table = ctc.forward(part, given)
        lengths = ctc.cut(part, given)
        return aten._ctc_loss_backward(grad, *given[:2], *lengths, loss, table, ctc.blank, ctc.infinite)

    return OpStrategy([Operand(call.tensors[0], Shard(0)), *operands], [shard], run, placed=True)


# -- distances ----------------------------------------------------------------------------------------------


def _distances(call: Call) -> OpStrategy | None:
    """Rule for cdist: distances between the rows of two tensors, for each leading index."""
    strategy = _leading_alike(call, filled(call))
    if strategy is not None:
        return strategy
    first, second = call.tensors[:2]
    shard, dims = first.shard, max(first.meta.dim(), second.meta.dim())
    if shard is not None and shard.dim == first.meta.dim() - 2:
        return OpStrategy([Operand(first, shard), Operand(second, None)], [shard.at(dims - 2)], filled(call))
    # Cut by the second: each micro-batch fills some columns of the distances.
    shard = second.shard
    if shard is not None and first.shard is None and shard.dim == second.meta.dim() - 2:
        operands = [Operand(first, None), Operand(second, shard)]
        return OpStrategy(operands, [shard.at(dims - 1)], filled(call))
    return None


def _distances_backward(call: Call) -> OpStrategy | None:
    """Rule for the gradient of the first tensor, from (grad, first, second, distances)."""
    run = _dense(filled(call))
    strategy = _leading_alike(call, run)
    if strategy is not None:
        return strategy
    grad, first, second, distances = call.tensors
    if grad.meta.dim() != 2 or first.meta.dim() != 2 or second.meta.dim() != 2:
        return None
    if first.shard is not None and first.shard.dim == 0:
        shard = first.shard
        operands = [Operand(grad, shard), Operand(first, shard), Operand(second, None)]
        return OpStrategy([*operands, Operand(distances, shard)], [shard], run)
    if second.shard is not None and first.shard is None and second.shard.dim == 0:
        across = second.shard.at(1)  # every row of the second contributes to each row of the first: a sum
        operands = [Operand(grad, across), Operand(first, None), Operand(second, second.shard)]
        return OpStrategy([*operands, Operand(distances, across)], [None], run, Sums)
    return None


def _leading_alike(call: Call, run: Callable[[Part, list[Tensor]], Any]) -> OpStrategy | None:
    """Return a strategy for samples in a leading dimension, which broadcasts; None if they are not."""
    leading = [(v.shard, v.shard.dim - v.meta.dim()) for v in call.tensors if v.shard is not None]
    places = {(shard[1:], place) for shard, place in leading if place < -2}  # -2 and -1 are the matrix
    if len(places) != 1:
        return None
    ((_, place),) = places
    shard = leading[0][0]
    operands = []
    for value in call.tensors:
        dim = value.meta.dim() + place
        if dim < 0 or value.meta.shape[dim] == 1 != shard.rows(call.samples):
            operands.append(Operand(value, None))
        elif value.meta.shape[dim] == shard.rows(call.samples):
            operands.append(Operand(value, shard.at(dim)))
        else:
            return None
    output = shapes(call)
    dim = output.dim() + place
    there = dim >= 0 and output.shape[dim] == shard.rows(call.samples)
    return OpStrategy(operands, [shard.at(dim) if there else None], run)


def _dense(run: Callable[[Part, list[Tensor]], Any]) -> Callable[[Part, list[Tensor]], Any]:
    # The kernel ignores strides and reads memory in row-major order.
    return lambda part, tensors: run(part, [tensor.contiguous() for tensor in tensors])


# -- lookups ------------------------------------------------------------------------------------------------


def _embedding_backward(call: Call) -> OpStrategy | None:
    """Rule for the gradient of an embedding table: a sum over the samples."""
    grad, index = call.tensors
    shard = grad.shard or index.shard
    if shard is None or call.argument("scale_grad_by_freq", False):
        return None  # scale_grad_by_freq needs the counts of rows in the whole batch
    if not all(_rows_of(value, shard, call.samples) for value in (grad, index)):
        return None
    return OpStrategy([Operand(grad, shard), Operand(index, shard)], [None], filled(call))


def _trilinear(call: Call) -> OpStrategy | None:
    """Rule for bilinear layers: a product of three tensors without some dimensions, summed over others."""
    expands = [call.argument(f"expand{number}") for number in (1, 2, 3)]
    count = call.tensors[0].meta.dim() + len(expands[0])
    # Position of each tensor's dimensions in the common space of `count` dimensions.
    own = [[dim for dim in range(count) if dim not in expand] for expand in expands]
    places = {
        dims[value.shard.dim]: value.shard
        for value, dims in zip(call.tensors, own, strict=True)
        if value.shard is not None
    }
    if len(places) != 1:
        return None
    ((place, shard),) = places.items()
    operands = []
    for value, dims in zip(call.tensors, own, strict=True):
        there = shard.at(dims.index(place)) if place in dims else None
        if there is not None and not _rows_of(value, there, call.samples):
            return None
        operands.append(Operand(value, there))
    summed = [dim % count for dim in call.argument("sumdim")]
    output = None if place in summed else shard.at(place - sum(dim < place for dim in summed))
    return OpStrategy(operands, [output], filled(call))


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
