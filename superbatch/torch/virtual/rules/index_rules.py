"""Rules for operators that index, gather, scatter, and write into slices of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, OpStrategy, run_of, substituted
from ..ir.reductions import Sums
from ..ir.shard import PARTIAL, REPLICATE, BatchSlice, Shard
from ..ir.values import Operand, Value

aten: Any = torch.ops.aten


def _dim(call: Call, default: int = 0) -> int:
    dim = call.argument("dim", default)
    return dim % max(call.tensors[0].meta.dim(), 1)  # 0-dimensional tensors accept dim=0 and -1


def _first_shard(call: Call) -> Shard | None:
    return next((value.shard for value in call.tensors if value.shard is not None), None)


def _rows_of(value: Value, shard: Shard, samples: int) -> bool:
    """Return whether the size of a tensor in the sharded dimension is that of the batch."""
    return value.meta.dim() > shard.dim and value.meta.shape[shard.dim] == shard.rows(samples)


def _gather(call: Call) -> OpStrategy | None:
    """Rule for gather, scatter and scatter_reduce along features: all tensors are cut alike."""
    shard = _first_shard(call)
    if shard is None:
        return None
    if shard.dim == _dim(call):  # a sample may index any other one
        return None
    if not all(_rows_of(value, shard, call.samples) for value in call.tensors):
        return None
    return OpStrategy([Operand(value, shard) for value in call.tensors], [shard], run_of(call))


def _scatter_add(call: Call) -> OpStrategy | None:
    """Rule for scatter_add along the samples into a full tensor, which sums over micro-batches."""
    strategy = _gather(call)
    if strategy is not None or len(call.tensors) != 3:
        return strategy
    target, index, source = call.tensors
    shard = index.shard or source.shard
    if target.shard is not None or shard is None or index.meta.dim() != source.meta.dim():
        return None
    if shard.dim != _dim(call) or not all(_rows_of(v, shard, call.samples) for v in (index, source)):
        return None
    return _added(call, [Operand(index, shard), Operand(source, shard)])


def _added(call: Call, operands: list[Operand]) -> OpStrategy:
    """Return a strategy that adds the sum over micro-batches to the target."""
    target = call.tensors[0]

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        # Scattered into zeros, and the target is added once: by the first micro-batch.
        zeroed = [torch.zeros_like(tensors[0]), *tensors[1:]]
        args, kwargs = substituted(call.args, call.kwargs, call.paths, zeroed)
        summand = call.func(*args, **kwargs)
        return summand + tensors[0] if microbatch.number == 0 else summand

    return OpStrategy([Operand(target, REPLICATE), *operands], [PARTIAL], run, Sums, reads_position=True)


def _index_select(call: Call) -> OpStrategy | None:
    """Rule for index_select of the same columns of each sample, or of a row of a full table per sample."""
    x, index = call.tensors[:2]
    dim = _dim(call)
    if x.shard is None and index.shard is not None and index.meta.dim() == 1:
        return OpStrategy(
            [Operand(x, REPLICATE), Operand(index, index.shard)], [index.shard.at(dim)], run_of(call)
        )
    if x.shard is None or x.shard.dim == dim or index.shard is not None:
        return None
    return OpStrategy([Operand(x, x.shard), Operand(index, REPLICATE)], [x.shard], run_of(call))


def _along_features(call: Call) -> OpStrategy | None:
    """Rule for index_add, index_copy and index_fill along features: the index is full, the rest is cut."""
    x, index, *source = call.tensors
    shard = x.shard or (source[0].shard if source else None)
    if shard is None or shard.dim == _dim(call) or index.shard is not None:
        return None
    scalar = call.func.overloadpacket is aten.index_fill  # its source is a 0-dimensional tensor
    batch = [x] if scalar else [x, *source]
    if not all(_rows_of(value, shard, call.samples) for value in batch):
        return None
    operands = [Operand(x, shard), Operand(index, REPLICATE)]
    operands += [Operand(value, REPLICATE if scalar else shard) for value in source]
    return OpStrategy(operands, [shard], run_of(call))


def _index(call: Call) -> OpStrategy | None:
    """Rule for ``table[index]`` with a full table and an index per sample."""
    table, *indices = call.tensors
    shard = _of_indices(call, indices)
    if shard is None or table.shard is not None:
        return None
    return OpStrategy(
        [Operand(table, REPLICATE), *(Operand(index, shard) for index in indices)], [shard], run_of(call)
    )


def _of_indices(call: Call, indices: list[Value]) -> Shard | None:
    """Return the common sharding of the indices; None if rows of the result would not be those of samples."""
    shard = next((index.shard for index in indices if index.shard is not None), None)
    listed = call.argument("indices")
    # The result of table[:, index] does not have the samples in front.
    if shard is None or any(item is None for item in listed[: len(indices)]):
        return None
    # The number of rows that a mask selects depends on its numbers. Indices of unequal shapes are broadcast.
    shape = indices[0].meta.shape
    if any(index.meta.dtype in (torch.bool, torch.uint8) or index.meta.shape != shape for index in indices):
        return None
    return shard


def _index_put(call: Call) -> OpStrategy | None:
    """Rule for ``table.index_put([index], values, accumulate=True)``, the gradient of ``table[index]``."""
    if not call.argument("accumulate", False):  # without a sum the last sample would win
        return None
    table, *indices, values = call.tensors
    shard = _of_indices(call, indices)
    if shard is None or table.shard is not None:
        return None
    dims = indices[0].meta.dim() + table.meta.dim() - len(indices)
    if values.meta.dim() != dims or not _rows_of(values, shard, call.samples):
        return None
    return _added(call, [*(Operand(index, shard) for index in indices), Operand(values, shard)])


# -- writes into slices -------------------------------------------------------------------------------------


def _copy(call: Call) -> OpStrategy | None:
    """Rule for copy: the source in the shape, dtype and device of the target, whose numbers are not read."""
    target, source = call.tensors
    shape = tuple(target.meta.shape)
    shard = target.shard
    if source.shard is not None:
        # Broadcasting aligns dimensions from the right: a source [N, d] fills a target [T, N, d].
        shard = source.shard.at(source.shard.dim + len(shape) - source.meta.dim())
    if shard is None or shard.dim < 0 or shape[shard.dim] != shard.rows(call.samples):
        return None
    dim = shard.dim + source.meta.dim() - len(shape)
    cut = dim >= 0 and source.meta.shape[dim] == shape[shard.dim]
    device, dtype = target.device, target.meta.dtype

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        size = [*shape[: shard.dim], shard.rows(microbatch.samples), *shape[shard.dim + 1 :]]
        return tensors[0].to(device, dtype).expand(size)

    return OpStrategy([Operand(source, shard.at(dim) if cut else REPLICATE)], [shard], run, light=True)


def _scatter_into(call: Call) -> OpStrategy | None:
    """Rule for slice_scatter and select_scatter, into features of each sample or into some samples."""
    base, source = call.tensors
    dim = _dim(call)
    select = call.func.overloadpacket is aten.select_scatter
    if base.shard is not None and base.shard.dim == dim:
        return _into_rows(call, base, base.shard, source, select)
    shard = base.shard
    if shard is None and source.shard is not None:
        # The source of select_scatter lacks `dim`, so the base has later dimensions one position further.
        shard = source.shard.at(source.shard.dim + (select and dim <= source.shard.dim))
    if shard is None or shard.dim == dim or not _rows_of(base, shard, call.samples):
        return None
    source_shard = shard.at(shard.dim - (select and dim < shard.dim))
    if not _rows_of(source, source_shard, call.samples):
        return None
    return OpStrategy([Operand(base, shard), Operand(source, source_shard)], [shard], run_of(call))


def _into_rows(call: Call, base: Value, shard: Shard, source: Value, select: bool) -> OpStrategy | None:
    rows = shard.rows(call.samples)
    if select:
        start, step = call.argument("index") % rows, 1
        stop = start + 1
    else:
        step = call.argument("step", 1)
        start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(rows)
    if shard.outer != 1:  # the rows of a micro-batch would be in several blocks
        return None
    if not select and (start, stop, step) == (0, rows, 1):
        return OpStrategy(
            [Operand(source, shard)], [shard], lambda microbatch, tensors: tensors[0], light=True
        )
    front = (slice(None),) * shard.dim

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        x, new = tensors
        first, last = microbatch.start * shard.inner, microbatch.stop * shard.inner
        skipped = max(-(-(first - start) // step), 0)  # rows of the source in earlier micro-batches
        begin, end = start + skipped * step, min(stop, last)
        if begin >= end:  # none of the written rows is in this micro-batch
            return x
        new = new.unsqueeze(shard.dim) if select else new
        count = -(-(end - begin) // step)
        x = x.clone()  # the rows may be a view of the program's batch, or stored for another sweep
        x[(*front, slice(begin - first, end - first, step))] = new.narrow(shard.dim, skipped, count)
        return x

    return OpStrategy([Operand(base, shard), Operand(source, REPLICATE)], [shard], run, reads_position=True)


def _diagonal_scatter(call: Call) -> OpStrategy | None:
    base, source = call.tensors
    shard = base.shard
    if shard is None or source.shard is None:
        return None
    dims = [call.argument(name) % base.meta.dim() for name in ("dim1", "dim2")]
    # diagonal() removes both dimensions and appends the diagonal as the last one.
    source_shard = shard.at(shard.dim - sum(dim < shard.dim for dim in dims))
    if shard.dim in dims or not _rows_of(source, source_shard, call.samples):
        return None
    return OpStrategy([Operand(base, shard), Operand(source, source_shard)], [shard], run_of(call))


RULES: dict[Any, Callable[[Call], OpStrategy | None]] = {
    aten.gather: _gather,
    aten.scatter: _gather,
    aten.scatter_add: _scatter_add,
    aten.scatter_reduce: _gather,
    aten.index_select: _index_select,
    aten.index_add: _along_features,
    aten.index_copy: _along_features,
    aten.index_fill: _along_features,
    aten.index: _index,
    aten.index_put: _index_put,
    aten.copy: _copy,
    aten.slice_scatter: _scatter_into,
    aten.select_scatter: _scatter_into,
    aten.diagonal_scatter: _diagonal_scatter,
}
