"""Rules for views and other changes of shape: the layout of the result, and the change for a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, Recipe, filled
from ..ir.layout import Layout, Part, sized
from ..ir.reductions import Joined
from ..ir.values import Operand, Value
from .told_sizes import backward_of_a_view, expanded

aten: Any = torch.ops.aten


def _batch(call: Call) -> tuple[Value, Layout] | None:
    value = call.tensors[0] if call.tensors else None
    if value is None or value.layout is None:
        return None
    return value, value.layout


def _view_of(
    value: Value, layout: Layout, output: Layout, run: Callable[[Part, list[Tensor]], Any]
) -> Recipe:
    return Recipe([Operand(value, layout)], [output], run, view=True, light=True)


def _same(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    return _view_of(*found, found[1], lambda part, tensors: tensors[0])


def reshaped(old: Sequence[int], layout: Layout, new: Sequence[int], samples: int) -> Layout | None:
    """Return the layout of the samples after a reshape; None if they are not in one dimension.

    Examples:
        >>> reshaped((4, 3, 5), Layout(0), (12, 5), 4)
        Layout(dim=0, outer=1, inner=3)
        >>> reshaped((3, 4, 5), Layout(1), (12, 5), 4)
        Layout(dim=0, outer=3, inner=1)
    """
    # In memory order a tensor is [before][samples][after]. The reshape may move factors between `outer` and
    # the dimensions in front, and between `inner` and those behind, but must not split the samples.
    before = math.prod(old[: layout.dim]) * layout.outer
    front = 1
    for dim, size in enumerate(new):
        if not before * front:  # an empty tensor: the counts do not tell the dimensions apart
            return None
        if before % front == 0 and size and size % (before // front * samples) == 0:
            outer = before // front
            after = layout.inner * math.prod(old[layout.dim + 1 :])
            inner = size // (outer * samples)
            if inner * math.prod(new[dim + 1 :]) == after:
                return Layout(dim, outer, inner)
        front *= size
    return None


def _view(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    size = call.argument("size")
    if not isinstance(size, (list, tuple)):
        return None  # view.dtype
    new = _inferred(size, value.meta.numel())
    if (output := reshaped(tuple(value.meta.shape), layout, new, call.samples)) is None:
        return None

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        # reshape: the strides of a micro-batch may not allow a view.
        return tensors[0].reshape(sized(new, output, part))

    return _view_of(value, layout, output, run)


def _inferred(shape: Sequence[int], numel: int) -> list[int]:
    """Return the shape with the size that -1 stands for."""
    known = math.prod(size for size in shape if size != -1)
    return [numel // known if size == -1 and known else size for size in shape]


def _permute(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    dims = [dim % value.meta.dim() for dim in call.argument("dims")]
    return _view_of(value, layout, layout.at(dims.index(layout.dim)), filled(call))


def _transpose(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    count = value.meta.dim()
    if call.func.overloadpacket is aten.t:
        first, second = (0, 1) if count == 2 else (0, 0)
    else:
        first, second = (call.argument(name) % count for name in ("dim0", "dim1"))
    new = {first: second, second: first}.get(layout.dim, layout.dim)
    return _view_of(value, layout, layout.at(new), filled(call))


def _unsqueeze(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    dim = call.argument("dim") % (value.meta.dim() + 1)
    # A new dimension in front of the samples moves them by one.
    return _view_of(value, layout, layout.at(layout.dim + (dim <= layout.dim)), filled(call))


def _squeeze(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    shape = value.meta.shape
    named = call.argument("dim")
    if named is None:
        dims = range(len(shape))
    else:
        dims = [dim % len(shape) for dim in (named if isinstance(named, (list, tuple)) else [named])]
    # Listed explicitly: `squeeze()` would remove the dimension of the samples in a micro-batch of one.
    gone = [dim for dim in dims if shape[dim] == 1 and dim != layout.dim]
    if layout.dim in dims and shape[layout.dim] == 1:
        return None
    output = layout.at(layout.dim - sum(dim < layout.dim for dim in gone))
    return _view_of(value, layout, output, lambda part, tensors: tensors[0].squeeze(gone))


def _select(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    dim = call.argument("dim") % value.meta.dim()
    if dim == layout.dim:
        if layout.outer != 1:
            return None
        # One sample, which one micro-batch has: a full value.
        row = call.argument("index") % layout.rows(call.samples)
        return _rows(value, layout, row, row + 1, 1, squeeze=True)
    return _view_of(value, layout, layout.at(layout.dim - (dim < layout.dim)), filled(call))


def _slice(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    dim = call.argument("dim", 0) % value.meta.dim()
    if dim != layout.dim:
        return _view_of(value, layout, layout, filled(call))
    step = call.argument("step", 1)
    start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(layout.rows(call.samples))
    block = call.samples * layout.inner
    # e.g. z[:N] of z = cat([a, b]): still all samples.
    if step == 1 and start % block == 0 and stop % block == 0 and stop > start:
        return _blocks(value, layout, start // block, stop // block)
    if layout.outer == 1:
        return _rows(value, layout, start, stop, step, squeeze=False)
    return None


def _blocks(value: Value, layout: Layout, first: int, last: int) -> Recipe:
    """Return a recipe for some of the outer blocks: all samples, repeated less often."""
    output = layout.repeated(last - first)

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        block = part.samples * layout.inner
        return tensors[0].narrow(layout.dim, first * block, (last - first) * block)

    return _view_of(value, layout, output, run)


def _rows(value: Value, layout: Layout, start: int, stop: int, step: int, *, squeeze: bool) -> Recipe:
    """Return a recipe for some of the samples: a full value, joined from the micro-batches that have them."""

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        first, last = part.start * layout.inner, part.stop * layout.inner
        # The first selected row that is not in front of this micro-batch; the division rounds up.
        begin = start if start >= first else start + -(-(first - start) // step) * step
        end = min(stop, last)
        chosen = slice(begin - first, max(end, begin) - first, step)
        return tensors[0][(slice(None),) * layout.dim + (chosen,)]

    class JoinedSlice(Joined):
        def result(self) -> list[Tensor]:
            (rows,) = super().result()
            return [rows.squeeze(layout.dim) if squeeze else rows]

    return Recipe([Operand(value, layout)], [None], run, lambda: JoinedSlice(layout), placed=True)


def _cat(call: Call) -> Recipe | None:
    parts = call.tensors
    first = next((value for value in parts if value.layout is not None), None)
    if first is None or first.layout is None:
        return None
    dim = call.argument("dim", 0)
    new = call.func.overloadpacket is aten.stack
    dim = dim % (first.meta.dim() + new)
    layout = first.layout
    if new or dim != layout.dim:
        rows = layout.rows(call.samples)
        if any(value.meta.dim() <= layout.dim or value.meta.shape[layout.dim] != rows for value in parts):
            return None  # an empty tensor [0], which cat skips, or another number of rows
        output = layout.at(layout.dim + (new and dim <= layout.dim))
        return Recipe([Operand(value, layout) for value in parts], [output], filled(call))
    # cat([a, b]) along the samples repeats the batch, if all have the same dimension and `inner`.
    if any(value.layout is None or value.layout[0::2] != layout[0::2] for value in parts):
        return None
    output = layout.repeated(sum(value.layout.outer for value in parts if value.layout))
    return Recipe([Operand(value, value.layout) for value in parts], [output], filled(call))


def _clone(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    # Not a view, though nothing is written in place here: the clone is contiguous, and the views of it that
    # follow would otherwise be copies.
    return Recipe([Operand(*found)], [found[1]], filled(call), light=True)


def _new(call: Call) -> Recipe | None:
    """Rule for new_zeros and the like, if a dimension of the new tensor has the rows of the batch."""
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    size = list(call.argument("size"))
    rows = layout.rows(call.samples)
    dims = [dim for dim, count in enumerate(size) if count == rows]
    if not dims:
        return None
    output = layout.at(layout.dim if layout.dim in dims else dims[0])  # the same dimension, if it fits
    dtype, device = value.meta.dtype, value.device

    def run(part: Part, tensors: list[Tensor]) -> Any:
        args, kwargs = call.replaced(size=sized(size, output, part))
        return call.func(torch.empty(1, dtype=dtype, device=device), *args[1:], **kwargs)

    # No operands: the new tensor does not wait for the numbers of the tensor that it is modelled on.
    return Recipe([], [output], run, light=True)


def _like(call: Call) -> Recipe | None:
    """Rule for zeros_like and the like, which read only the shape."""
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    shape, dtype, device = tuple(value.meta.shape), value.meta.dtype, value.device

    def run(part: Part, tensors: list[Tensor]) -> Any:
        # One element, expanded: it carries the shape without the memory.
        one = torch.empty(1, dtype=dtype, device=device).expand(sized(shape, layout, part))
        return call.func(one, *call.args[1:], **call.kwargs)

    return Recipe([], [layout], run, light=True)


def _repeat(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    repeats = list(call.argument("repeats"))
    dim = layout.dim + len(repeats) - value.meta.dim()
    # The result is [repeat][outer][samples][inner], so repetitions multiply `outer`.
    output = Layout(dim, layout.outer * repeats[dim], layout.inner)
    return Recipe([Operand(value, layout)], [output], filled(call))


def _diagonal(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    value, layout = found
    dims = [call.argument(name) % value.meta.dim() for name in ("dim1", "dim2")]
    if layout.dim in dims:
        return None
    output = layout.at(layout.dim - sum(dim < layout.dim for dim in dims))
    return _view_of(value, layout, output, filled(call))


def _unfold(call: Call) -> Recipe | None:
    found = _batch(call)
    if found is None or call.argument("dimension") % found[0].meta.dim() == found[1].dim:
        return None
    return _view_of(*found, found[1], filled(call))


def _complex_view(call: Call) -> Recipe | None:
    if (found := _batch(call)) is None:
        return None
    last = found[1].dim == found[0].meta.dim() - 1
    if last and call.func.overloadpacket is aten.view_as_complex:
        return None  # the last dimension is real and imaginary part, not the samples
    return _view_of(*found, found[1], filled(call))


def _resolved(call: Call) -> Recipe | None:
    """Rule that materializes conjugates and negatives: a wrapper subclass has no bit for them."""
    value, run = call.tensors[0], filled(call)
    return Recipe(
        [Operand(value, value.layout)],
        [value.layout],
        lambda part, tensors: run(part, tensors).resolve_conj().resolve_neg(),
    )


LIKES = {aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like}

RULES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.lift_fresh: _same,
    aten.view.default: _view,
    aten._unsafe_view: _view,
    aten._reshape_alias: _view,
    aten._reshape_copy: _view,
    aten.view_copy.default: _view,
    aten.permute: _permute,
    aten.transpose.int: _transpose,
    aten.t: _transpose,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.expand: expanded,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.diagonal: _diagonal,
    aten.unfold: _unfold,
    aten.view_as_real: _complex_view,
    aten.view_as_complex: _complex_view,
    aten._conj: _resolved,
    aten._neg_view: _resolved,
    aten._conj_physical: _resolved,
    aten.cat: _cat,
    aten.stack: _cat,
    aten.clone: _clone,
    aten.new_zeros: _new,
    aten.new_ones: _new,
    aten.new_full: _new,
    aten.new_empty: _new,
    **dict.fromkeys(LIKES, _like),
    aten.repeat: _repeat,
    aten.select_backward: backward_of_a_view,
    aten.slice_backward: backward_of_a_view,
    aten.diagonal_backward: backward_of_a_view,
    aten.unfold_backward: backward_of_a_view,
}
