"""Dimensions of full values that grow with the number of samples.

Batch statistics, losses and gradients of weights have the same size for any batch. Half of a batch, a
permuted batch or gathered embeddings grow with the batch, and need more memory than a micro-batch.
`Value.grows` lists the dimensions that grow. Those of an operator's results are found by computing their
shapes again for inputs whose growing dimensions are twice as large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.torch.memory.out_of_memory import out_of_memory

from ..ir.calls import Call, meta_tensor, shapes
from ..ir.shard import Shard
from ..ir.values import Value
from .memo import KeyedCall

aten: Any = torch.ops.aten

_PICKS = {aten.slice.Tensor, aten.select.int}
_JOINS = {aten.cat, aten.stack}
_PADS = {aten.slice_backward.default, aten.select_backward.default}  # pad picked rows with zeros
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten._reshape_copy.default,
}
# Operators with sizes as arguments, which would not match doubled inputs.
_WITH_SIZES = {
    aten.expand.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.as_strided.default,
    aten.new_zeros.default,
    aten.embedding_dense_backward.default,
}


def may_grow(keyed: KeyedCall, results: Any) -> bool:
    """Return whether a result may be full and grow with the batch.

    A fast test before `mark_growth`, because it runs for every operation and few results grow.
    """
    batch = False
    for value in keyed.tensors:
        if value.grows or value.picked:
            return True
        batch = batch or value.shard is not None
    if not batch:
        return False
    value = results if type(results) is Value else next(iter(values_of(results)), None)
    if value is None:
        return False
    if value.shard is not None:  # z @ z.T has one row, and one column, per sample
        return value.node is not None and any(read.grows for read, _ in value.node.operands)
    return value.node is None or value.node.once or keyed.func in _PICKS


def values_of(results: Any) -> list[Value]:
    """Return the values among the results of an operation, without sparse tensors."""
    return [item for item in _flat(results) if type(item) is Value and item.meta is not None]


def mark_growth(keyed: KeyedCall, results: Any, microbatch_size: int) -> bool:
    """Mark the results of an operation that grow with the batch, in dimensions above `microbatch_size`.

    Return True if the operation copies more rows than a micro-batch out of the batch into a full tensor.
    """
    values = values_of(results)
    if not values:
        return False
    node = next((value.node for value in values if value.node is not None), None)
    read = {} if node is None else {id(v): shard for v, shard in node.operands if shard is not None}
    reads = tuple([read.get(id(value)) for value in keyed.tensors])
    # Without a key, an argument may not be comparable, so nothing is cached.
    if keyed.key is None:
        return _marked(keyed, values, reads, microbatch_size)
    # `keyed.key` does not have the growth of the inputs: they may be gathered values or parameters.
    grown = tuple([(value.grows, value.picked, id(value.meta)) for value in keyed.tensors])
    shape = tuple([(value.shard, id(value.meta)) for value in values])
    key = _Key((keyed.key, microbatch_size, reads, grown, shape))
    key.call = keyed, values, reads
    growth = _cached(key)
    for value, (grows, picked) in zip(values, growth.results, strict=True):
        value.grows, value.picked = grows, picked
    return growth.copies_batch


class _Growth(NamedTuple):
    """Cached result for all calls with the same key on values that grow in the same dimensions."""

    results: list[tuple[tuple[int, ...], int]]  # `grows` and `picked`
    copies_batch: bool
    held: tuple[Any, ...]  # objects whose ids are in the key, so that no other object gets these ids


class _Key(tuple[Any, ...]):
    """Cache key; refers to the call until it is evaluated."""

    call: tuple[KeyedCall, list[Value], tuple[Shard | None, ...]] | None


@lru_cache(maxsize=1 << 12)
def _cached(key: _Key) -> _Growth:
    call, key.call = key.call, None  # otherwise the cache would keep values of the first block alive
    assert call is not None
    keyed, values, reads = call
    copies_batch = _marked(keyed, values, reads, key[1])
    held = (keyed.func, *(value.meta for value in (*keyed.tensors, *values)))
    return _Growth([(value.grows, value.picked) for value in values], copies_batch, held)


def _marked(
    keyed: KeyedCall, values: list[Value], reads: tuple[Shard | None, ...], microbatch_size: int
) -> bool:
    dims = [_dims_read_whole(v, read, microbatch_size) for v, read in zip(keyed.tensors, reads, strict=True)]
    # x[:100] and x[0] have the same number of rows in a doubled batch.
    if keyed.func in _PICKS and len(values) == 1 and values[0].shard is None:
        _picked(keyed.call(), values[0], keyed.tensors[0], dims[0], microbatch_size)
        return keyed.tensors[0].shard is not None and bool(values[0].grows)
    picked = [value.picked for value in keyed.tensors]
    # A Python loop that stacks x[0], x[1], ...: each row is small, but all of them are the batch.
    if keyed.func.overloadpacket in _JOINS and sum(picked) > microbatch_size and values[0].shard is None:
        values[0].grows = ((keyed.call().argument("dim", 0)) % max(values[0].meta.dim(), 1),)
        return True
    # The gradient of x[:100] has the size of x, although its input has 100 rows.
    if keyed.func in _PADS and max(picked) and not any(dims) and values[0].shard is None:
        dim = keyed.call().argument("dim") % max(values[0].meta.dim(), 1)
        if values[0].meta.shape[dim] > microbatch_size:
            values[0].grows = (dim,)
            return True
    if any(dims):
        _grown(keyed, values, dims, microbatch_size)
    # Other results, such as x[0] * 2, still consist of picked rows.
    for value in values:
        if value.shard is None and not value.grows and value.meta.dim():
            value.picked = max(picked, default=0)
    return False


def _flat(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (list, tuple)) else (results,)


def _dims_read_whole(value: Value, read: Shard | None, microbatch_size: int) -> tuple[int, ...]:
    """Return the dimensions that grow with the batch and that an operation reads in full."""
    if value.meta is None:
        return ()
    dims = {*value.grows, *(() if value.shard is None else (value.shard.dim,))}
    return tuple(sorted(dims - ({read.dim} if read is not None else set())))


def _picked(call: Call, result: Value, source: Value, dims: tuple[int, ...], microbatch_size: int) -> None:
    """Mark a result whose rows were picked by index, so that their number does not depend on the batch."""
    shard = source.shard
    dim = (call.argument("dim") or 0) % max(source.meta.dim(), 1)
    grows = {*dims, *(() if shard is None else (shard.dim,))}
    removed = call.func is aten.select.int
    # select() removes `dim`, and later dimensions move to the front by one.
    rest = [other - (removed and other > dim) for other in grows - {dim}]
    if dim not in grows:
        result.picked = source.picked
    else:
        rows = 1 if removed else int(result.meta.shape[dim])
        if rows > microbatch_size:
            rest.append(dim)
        else:
            result.picked = rows
    result.grows = tuple(sorted(rest))


def _grown(
    keyed: KeyedCall, values: Sequence[Value], dims: Sequence[tuple[int, ...]], microbatch_size: int
) -> None:
    larger = _larger(keyed, dims, microbatch_size)
    for index, value in enumerate(values):
        shape = tuple(value.meta.shape)
        if keyed.func in _RESHAPES:
            growing = _reshaped(tuple(keyed.tensors[0].meta.shape), dims[0], shape)
        elif larger is not None and index < len(larger):
            twice = larger[index]
            growing = {dim for dim, size in enumerate(shape) if dim < len(twice) and twice[dim] != size}
        else:
            growing = _alike(keyed, dims, shape, microbatch_size)
        own = set() if value.shard is None else {value.shard.dim}
        value.grows = tuple(sorted(growing - own))


def _larger(
    keyed: KeyedCall, dims: Sequence[tuple[int, ...]], microbatch_size: int
) -> list[tuple[int, ...]] | None:
    """Return the shapes of the results for growing dimensions twice as long; None if unknown."""
    unknown = any(value.meta is None for value in keyed.tensors)
    if unknown or keyed.func in _WITH_SIZES or keyed.func in _RESHAPES:
        return None
    doubled = [
        Value(_doubled(value.meta, grows or _of_index(value, microbatch_size)), value.device)
        for value, grows in zip(keyed.tensors, dims, strict=True)
    ]
    call = keyed.call()
    try:
        results = shapes(call.on(doubled))
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        if out_of_memory(error):
            raise
        return None  # such as an argument that does not match the doubled input
    return [tuple(item.shape) for item in _flat(results) if isinstance(item, Tensor)]


def _of_index(value: Value, microbatch_size: int) -> tuple[int, ...]:
    """Return the dimensions of an index or a mask that are longer than a micro-batch."""
    if value.shard is not None or value.has_gradient:
        return ()
    return tuple(dim for dim, size in enumerate(value.meta.shape) if size > microbatch_size)


def _doubled(meta: Tensor, dims: Sequence[int]) -> Tensor:
    if not dims:
        return meta
    shape = tuple(2 * size if dim in dims else size for dim, size in enumerate(meta.shape))
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return meta_tensor(shape, stride, meta.dtype)


def _reshaped(old: Sequence[int], dims: Sequence[int], new: Sequence[int]) -> set[int]:
    """Return the dimensions after a reshape, matched by the number of elements before them."""
    positions: set[int] = set()
    for dim in dims:
        before, through = math.prod(old[:dim]), math.prod(old[: dim + 1])
        front = 1
        for position, size in enumerate(new):
            if front < through and front * size > before and size > 1:
                positions.add(position)
                break
            front *= size
    return positions


def _alike(
    keyed: KeyedCall, dims: Sequence[tuple[int, ...]], shape: Sequence[int], microbatch_size: int
) -> set[int]:
    """Guess the growing dimensions by size, else by position, among those longer than a micro-batch."""
    sizes = {value.meta.shape[dim] for value, grows in zip(keyed.tensors, dims, strict=True) for dim in grows}
    sizes |= {size for value in keyed.tensors if value.shard for size in [value.shard.rows(keyed.samples)]}
    growing = {dim for dim, size in enumerate(shape) if size in sizes and size > microbatch_size}
    if growing:
        return growing
    positions = {dim for grows in dims for dim in grows}
    return {dim for dim in positions if dim < len(shape) and shape[dim] > microbatch_size}
