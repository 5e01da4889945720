"""Rules for views and other operators that change the shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, OpStrategy, run_of
from ..ir.reductions import Joined
from ..ir.shard import PARTIAL, BatchSlice, Shard, microbatch_shape
from ..ir.values import Operand, Value
from .shape_arguments import backward_of_a_view, expanded

aten: Any = torch.ops.aten


def _sharded_input(call: Call) -> tuple[Value, Shard] | None:
    value = call.tensors[0] if call.tensors else None
    if value is None or value.shard is None:
        return None
    return value, value.shard


def _view_of(
    value: Value, shard: Shard, output: Shard, run: Callable[[BatchSlice, list[Tensor]], Any]
) -> OpStrategy:
    return OpStrategy([Operand(value, shard)], [output], run, view=True, light=True)


def _same(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    return _view_of(*sharded, sharded[1], lambda microbatch, tensors: tensors[0])


def reshaped(old: Sequence[int], shard: Shard, new: Sequence[int], samples: int) -> Shard | None:
    """Return the sharding of the samples after a reshape; None if the reshape splits them.

    Examples:
        >>> reshaped((4, 3, 5), Shard(0), (12, 5), 4)
        Shard(dim=0, outer=1, inner=3)
        >>> reshaped((3, 4, 5), Shard(1), (12, 5), 4)
        Shard(dim=0, outer=3, inner=1)
    """
    # In memory order a tensor is [before][samples][after]. The reshape may move factors between `outer` and
    # earlier dimensions, and between `inner` and later ones, but must not split the samples.
    before = math.prod(old[: shard.dim]) * shard.outer
    front = 1
    for dim, size in enumerate(new):
        if not before * front:  # an empty tensor: products of 0 do not identify a dimension
            return None
        if before % front == 0 and size and size % (before // front * samples) == 0:
            outer = before // front
            after = shard.inner * math.prod(old[shard.dim + 1 :])
            inner = size // (outer * samples)
            if inner * math.prod(new[dim + 1 :]) == after:
                return Shard(dim, outer, inner)
        front *= size
    return None


def _view(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    size = call.argument("size")
    if not isinstance(size, (list, tuple)):
        return None  # view.dtype
    new = _inferred(size, value.meta.numel())
    if (output := reshaped(tuple(value.meta.shape), shard, new, call.samples)) is None:
        return None

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        # Not view(), which raises for the strides of some micro-batches.
        return tensors[0].reshape(microbatch_shape(new, output, microbatch))

    return _view_of(value, shard, output, run)


def _inferred(shape: Sequence[int], numel: int) -> list[int]:
    """Return the shape with the size in place of -1."""
    others = math.prod(size for size in shape if size != -1)
    return [numel // others if size == -1 and others else size for size in shape]


def _permute(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    dims = [dim % value.meta.dim() for dim in call.argument("dims")]
    # The samples move to the position of their dimension in `dims`.
    return _view_of(value, shard, shard.at(dims.index(shard.dim)), run_of(call))


def _transpose(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    count = value.meta.dim()
    if call.func.overloadpacket is aten.t:
        first, second = (0, 1) if count == 2 else (0, 0)
    else:
        first, second = (call.argument(name) % count for name in ("dim0", "dim1"))
    # The samples move if their dimension is one of the two.
    new = {first: second, second: first}.get(shard.dim, shard.dim)
    return _view_of(value, shard, shard.at(new), run_of(call))


def _unsqueeze(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    dim = call.argument("dim") % (value.meta.dim() + 1)
    # A new dimension in front of the samples shifts them by one.
    return _view_of(value, shard, shard.at(shard.dim + (dim <= shard.dim)), run_of(call))


def _squeeze(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    shape = value.meta.shape
    named = call.argument("dim")
    if named is None:
        dims = range(len(shape))
    else:
        dims = [dim % len(shape) for dim in (named if isinstance(named, (list, tuple)) else [named])]
    # Listed explicitly: in a micro-batch of one sample, squeeze() would remove the dimension of the samples.
    gone = [dim for dim in dims if shape[dim] == 1 and dim != shard.dim]
    if shard.dim in dims and shape[shard.dim] == 1:
        return None
    output = shard.at(shard.dim - sum(dim < shard.dim for dim in gone))
    return _view_of(value, shard, output, lambda microbatch, tensors: tensors[0].squeeze(gone))


def _select(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    dim = call.argument("dim") % value.meta.dim()
    if dim == shard.dim:
        if shard.outer != 1:
            return None
        # The result is one sample, which is in one micro-batch: a full value.
        row = call.argument("index") % shard.rows(call.samples)
        return _rows(value, shard, row, row + 1, 1, squeeze=True)
    # select() removes `dim`, so the samples shift by one if they are behind it.
    return _view_of(value, shard, shard.at(shard.dim - (dim < shard.dim)), run_of(call))


def _slice(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    dim = call.argument("dim", 0) % value.meta.dim()
    if dim != shard.dim:
        return _view_of(value, shard, shard, run_of(call))
    step = call.argument("step", 1)
    start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(shard.rows(call.samples))
    block = call.samples * shard.inner
    # Such as z[:N] of z = cat([a, b]), which has all samples.
    if step == 1 and start % block == 0 and stop % block == 0 and stop > start:
        return _blocks(value, shard, start // block, stop // block)
    if shard.outer == 1:
        return _rows(value, shard, start, stop, step, squeeze=False)
    return None


def _blocks(value: Value, shard: Shard, first: int, last: int) -> OpStrategy:
    """Return a strategy that takes some of the outer blocks, each of which has all samples."""
    output = shard.repeated(last - first)

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        block = microbatch.samples * shard.inner
        return tensors[0].narrow(shard.dim, first * block, (last - first) * block)

    return _view_of(value, shard, output, run)


def _rows(value: Value, shard: Shard, start: int, stop: int, step: int, *, squeeze: bool) -> OpStrategy:
    """Return a strategy that takes some of the samples, as a full value joined from the micro-batches."""

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        first, last = microbatch.start * shard.inner, microbatch.stop * shard.inner
        # First selected row that is not in an earlier micro-batch; the division rounds up.
        begin = start if start >= first else start + -(-(first - start) // step) * step
        end = min(stop, last)
        selected = slice(begin - first, max(end, begin) - first, step)
        return tensors[0][(slice(None),) * shard.dim + (selected,)]

    class JoinedSlice(Joined):
        def result(self) -> list[Tensor]:
            (rows,) = super().result()
            return [rows.squeeze(shard.dim) if squeeze else rows]

    return OpStrategy(
        [Operand(value, shard)], [PARTIAL], run, lambda: JoinedSlice(shard), reads_position=True
    )


def _cat(call: Call) -> OpStrategy | None:
    values = call.tensors
    first = next((value for value in values if value.shard is not None), None)
    if first is None or first.shard is None:
        return None
    dim = call.argument("dim", 0)
    new = call.func.overloadpacket is aten.stack
    dim = dim % (first.meta.dim() + new)
    shard = first.shard
    if new or dim != shard.dim:
        rows = shard.rows(call.samples)
        if any(value.meta.dim() <= shard.dim or value.meta.shape[shard.dim] != rows for value in values):
            return None  # cat skips an empty tensor [0]; other sizes have no rows per sample
        output = shard.at(shard.dim + (new and dim <= shard.dim))
        return OpStrategy([Operand(value, shard) for value in values], [output], run_of(call))
    # cat([a, b]) along the samples repeats the batch if all have the same dimension and `inner`.
    if any(value.shard is None or value.shard[0::2] != shard[0::2] for value in values):
        return None
    output = shard.repeated(sum(value.shard.outer for value in values if value.shard))
    return OpStrategy([Operand(value, value.shard) for value in values], [output], run_of(call))


def _clone(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    # A copy, although values are never written: later views need the contiguous memory of the clone.
    return OpStrategy([Operand(*sharded)], [sharded[1]], run_of(call), light=True)


def _new(call: Call) -> OpStrategy | None:
    """Rule for new_zeros, new_full and others, if the new tensor has a dimension of the batch's size."""
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    size = list(call.argument("size"))
    rows = shard.rows(call.samples)
    dims = [dim for dim, count in enumerate(size) if count == rows]
    if not dims:
        return None
    output = shard.at(shard.dim if shard.dim in dims else dims[0])  # the same dimension, if its size fits
    dtype, device = value.meta.dtype, value.device

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        args, kwargs = call.replaced(size=microbatch_shape(size, output, microbatch))
        return call.func(torch.empty(1, dtype=dtype, device=device), *args[1:], **kwargs)

    # No operands, because the new tensor does not depend on the numbers of the other one.
    return OpStrategy([], [output], run, light=True)


def _like(call: Call) -> OpStrategy | None:
    """Rule for zeros_like, full_like and others, which read the shape only."""
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    shape, dtype, device = tuple(value.meta.shape), value.meta.dtype, value.device

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        # One expanded element has the shape, and needs no memory for it.
        one = torch.empty(1, dtype=dtype, device=device).expand(microbatch_shape(shape, shard, microbatch))
        return call.func(one, *call.args[1:], **call.kwargs)

    return OpStrategy([], [shard], run, light=True)


def _repeat(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    repeats = list(call.argument("repeats"))
    dim = shard.dim + len(repeats) - value.meta.dim()
    # The result is [repeats][outer][samples][inner], so `outer` is multiplied.
    output = Shard(dim, shard.outer * repeats[dim], shard.inner)
    return OpStrategy([Operand(value, shard)], [output], run_of(call))


def _diagonal(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    value, shard = sharded
    dims = [call.argument(name) % value.meta.dim() for name in ("dim1", "dim2")]
    if shard.dim in dims:  # an element of the diagonal would depend on the position of a sample
        return None
    # diagonal() removes both dimensions and appends one at the end.
    output = shard.at(shard.dim - sum(dim < shard.dim for dim in dims))
    return _view_of(value, shard, output, run_of(call))


def _unfold(call: Call) -> OpStrategy | None:
    sharded = _sharded_input(call)
    # Windows along the samples would have several samples each.
    if sharded is None or call.argument("dimension") % sharded[0].meta.dim() == sharded[1].dim:
        return None
    return _view_of(*sharded, sharded[1], run_of(call))


def _complex_view(call: Call) -> OpStrategy | None:
    if (sharded := _sharded_input(call)) is None:
        return None
    last = sharded[1].dim == sharded[0].meta.dim() - 1
    if last and call.func.overloadpacket is aten.view_as_complex:
        return None  # the last dimension holds the real and the imaginary part
    return _view_of(*sharded, sharded[1], run_of(call))


def _resolved(call: Call) -> OpStrategy | None:
    """Rule for conjugates and negatives, which are computed: a wrapper subclass has no bit for them."""
    value, run = call.tensors[0], run_of(call)
    return OpStrategy(
        [Operand(value, value.shard)],
        [value.shard],
        lambda microbatch, tensors: run(microbatch, tensors).resolve_conj().resolve_neg(),
    )


LIKES = {aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like}

RULES: dict[Any, Callable[[Call], OpStrategy | None]] = {
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
