"""Rules for operators that select, gather, scatter and write parts of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, Recipe, filled, substituted
from ..ir.layout import Layout, Part
from ..ir.reductions import Sums
from ..ir.values import Operand, Value

aten: Any = torch.ops.aten


def _dim(call: Call, default: int = 0) -> int:
    dim = call.argument("dim", default)
    return dim % max(call.tensors[0].meta.dim(), 1)  # 0-dimensional tensors accept dim=0 and -1


def _first_layout(call: Call) -> Layout | None:
    return next((value.layout for value in call.tensors if value.layout is not None), None)


def _rows_of(value: Value, layout: Layout, samples: int) -> bool:
    """Return whether a tensor has as many rows as the samples in that dimension."""
    return value.meta.dim() > layout.dim and value.meta.shape[layout.dim] == layout.rows(samples)


def _gather(call: Call) -> Recipe | None:
    """Rule for gather, scatter and scatter_reduce along another dimension: all tensors are cut alike."""
    layout = _first_layout(call)
    if layout is None:
        return None
    if layout.dim == _dim(call):  # the index may point at any sample
        return None
    if not all(_rows_of(value, layout, call.samples) for value in call.tensors):
        return None
    return Recipe([Operand(value, layout) for value in call.tensors], [layout], filled(call))


def _scatter_add(call: Call) -> Recipe | None:
    """Rule for scatter_add along the samples into a full tensor: the shares of micro-batches add up."""
    recipe = _gather(call)
    if recipe is not None or len(call.tensors) != 3:
        return recipe
    target, index, source = call.tensors
    layout = index.layout or source.layout
    if target.layout is not None or layout is None or index.meta.dim() != source.meta.dim():
        return None
    if layout.dim != _dim(call) or not all(_rows_of(v, layout, call.samples) for v in (index, source)):
        return None
    return _added(call, [Operand(index, layout), Operand(source, layout)])


def _added(call: Call, operands: list[Operand]) -> Recipe:
    """Return a recipe that sums the shares of micro-batches; the first one includes the target."""
    target = call.tensors[0]

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        # Scattered into zeros: every micro-batch would add the target's own numbers once more.
        given = [torch.zeros_like(tensors[0]), *tensors[1:]]
        args, kwargs = substituted(call.args, call.kwargs, call.paths, given)
        share = call.func(*args, **kwargs)
        return share + tensors[0] if part.number == 0 else share

    return Recipe([Operand(target, None), *operands], [None], run, Sums, placed=True)


def _index_select(call: Call) -> Recipe | None:
    """Rule for the same columns of each sample, or for rows of a full table, one per sample."""
    x, index = call.tensors[:2]
    dim = _dim(call)
    if x.layout is None and index.layout is not None and index.meta.dim() == 1:
        return Recipe([Operand(x, None), Operand(index, index.layout)], [index.layout.at(dim)], filled(call))
    if x.layout is None or x.layout.dim == dim or index.layout is not None:
        return None
    return Recipe([Operand(x, x.layout), Operand(index, None)], [x.layout], filled(call))


def _along_features(call: Call) -> Recipe | None:
    """Rule for index_add, index_copy and index_fill along features: the index is full, the rest is cut."""
    x, index, *source = call.tensors
    layout = x.layout or (source[0].layout if source else None)
    if layout is None or layout.dim == _dim(call) or index.layout is not None:
        return None
    scalars = call.func.overloadpacket is aten.index_fill  # its source is a 0-dimensional value
    batch = [x] if scalars else [x, *source]
    if not all(_rows_of(value, layout, call.samples) for value in batch):
        return None
    operands = [Operand(x, layout), Operand(index, None)]
    operands += [Operand(value, None if scalars else layout) for value in source]
    return Recipe(operands, [layout], filled(call))


def _index(call: Call) -> Recipe | None:
    """Rule for ``table[index]`` with a full table and an index per sample."""
    table, *indices = call.tensors
    layout = _of_indices(call, indices)
    if layout is None or table.layout is not None:
        return None
    return Recipe(
        [Operand(table, None), *(Operand(index, layout) for index in indices)], [layout], filled(call)
    )


def _of_indices(call: Call, indices: list[Value]) -> Layout | None:
    """Return the common layout of the indices; None if they do not index the leading dimensions alike."""
    layout = next((index.layout for index in indices if index.layout is not None), None)
    listed = call.argument("indices")
    # table[:, index]: the samples would not be in front of the result.
    if layout is None or any(item is None for item in listed[: len(indices)]):
        return None
    # A mask selects a number of rows that depends on the numbers; indices of other shapes broadcast.
    shape = indices[0].meta.shape
    if any(index.meta.dtype in (torch.bool, torch.uint8) or index.meta.shape != shape for index in indices):
        return None
    return layout


def _index_put(call: Call) -> Recipe | None:
    """Rule for ``table.index_put([index], values, accumulate=True)``, the gradient of ``table[index]``."""
    if not call.argument("accumulate", False):  # overwriting is no sum: the last sample wins
        return None
    table, *indices, values = call.tensors
    layout = _of_indices(call, indices)
    if layout is None or table.layout is not None:
        return None
    dims = indices[0].meta.dim() + table.meta.dim() - len(indices)
    if values.meta.dim() != dims or not _rows_of(values, layout, call.samples):
        return None
    return _added(call, [*(Operand(index, layout) for index in indices), Operand(values, layout)])


# -- writing into a part ------------------------------------------------------------------------------------


def _copy(call: Call) -> Recipe | None:
    """Rule for copy: the source in the shape and dtype of the target, whose numbers are not read."""
    target, source = call.tensors
    shape = tuple(target.meta.shape)
    layout = target.layout
    if source.layout is not None:
        # Broadcasting aligns dimensions from the right: a source [N, d] fills a target [T, N, d].
        layout = source.layout.at(source.layout.dim + len(shape) - source.meta.dim())
    if layout is None or layout.dim < 0 or shape[layout.dim] != layout.rows(call.samples):
        return None
    dim = layout.dim + source.meta.dim() - len(shape)
    cut = dim >= 0 and source.meta.shape[dim] == shape[layout.dim]
    dtype = target.meta.dtype

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        size = [*shape[: layout.dim], layout.rows(part.samples), *shape[layout.dim + 1 :]]
        return tensors[0].to(dtype).expand(size)

    return Recipe([Operand(source, layout.at(dim) if cut else None)], [layout], run, light=True)


def _scatter_into(call: Call) -> Recipe | None:
    """Rule for slice_scatter and select_scatter: into features of each sample, or into some samples."""
    base, source = call.tensors
    dim = _dim(call)
    select = call.func.overloadpacket is aten.select_scatter
    if base.layout is not None and base.layout.dim == dim:
        return _into_rows(call, base, base.layout, source, select)
    layout = base.layout
    if layout is None and source.layout is not None:
        # select_scatter: the source lacks `dim`, so later dimensions are one further in the base.
        layout = source.layout.at(source.layout.dim + (select and dim <= source.layout.dim))
    if layout is None or layout.dim == dim or not _rows_of(base, layout, call.samples):
        return None
    there = layout.at(layout.dim - (select and dim < layout.dim))
    if not _rows_of(source, there, call.samples):
        return None
    return Recipe([Operand(base, layout), Operand(source, there)], [layout], filled(call))


def _into_rows(call: Call, base: Value, layout: Layout, source: Value, select: bool) -> Recipe | None:
    rows = layout.rows(call.samples)
    if select:
        start, step = call.argument("index") % rows, 1
        stop = start + 1
    else:
        step = call.argument("step", 1)
        start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(rows)
    if layout.outer != 1:  # the written rows would be in several blocks of a micro-batch
        return None
    if not select and (start, stop, step) == (0, rows, 1):
        return Recipe([Operand(source, layout)], [layout], lambda part, tensors: tensors[0], light=True)
    front = (slice(None),) * layout.dim

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        x, new = tensors
        first, last = part.start * layout.inner, part.stop * layout.inner
        skipped = max(-(-(first - start) // step), 0)  # rows of the source that earlier micro-batches take
        begin, end = start + skipped * step, min(stop, last)
        if begin >= end:  # none of the written rows is in this micro-batch
            return x
        new = new.unsqueeze(layout.dim) if select else new
        count = -(-(end - begin) // step)
        x = x.clone()  # the rows may be a view of the program's batch, or be stored for another sweep
        x[(*front, slice(begin - first, end - first, step))] = new.narrow(layout.dim, skipped, count)
        return x

    return Recipe([Operand(base, layout), Operand(source, None)], [layout], run, placed=True)


def _diagonal_scatter(call: Call) -> Recipe | None:
    base, source = call.tensors
    layout = base.layout
    if layout is None or source.layout is None:
        return None
    dims = [call.argument(name) % base.meta.dim() for name in ("dim1", "dim2")]
    # diagonal removes both dimensions and appends the diagonal as the last one.
    there = layout.at(layout.dim - sum(dim < layout.dim for dim in dims))
    if layout.dim in dims or not _rows_of(source, there, call.samples):
        return None
    return Recipe([Operand(base, layout), Operand(source, there)], [layout], filled(call))


RULES: dict[Any, Callable[[Call], Recipe | None]] = {
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
