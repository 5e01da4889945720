"""Dimensions of full values that grow with the number of samples.

A batch statistic, a loss and the gradient of a weight have the same size for any batch. Half of a batch, a
permuted batch or a gathered embedding grows with it and takes memory that a micro-batch does not.
`Value.grows` lists those dimensions. For the results of an operator they are found by evaluating its shapes
again with those dimensions twice as large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.torch.memory.out_of_memory import out_of_memory

from ..ir.calls import Call, blank, shapes
from ..ir.shard import Shard
from ..ir.values import Value
from .memo import Form

aten: Any = torch.ops.aten

_PICKS = {aten.slice.Tensor, aten.select.int}
_JOINS = {aten.cat, aten.stack}
_PLACES = {aten.slice_backward.default, aten.select_backward.default}  # put picked rows among zeros
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten._reshape_copy.default,
}
# Operators that take sizes as arguments: doubled inputs would contradict them.
_WITH_SIZES = {
    aten.expand.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.as_strided.default,
    aten.new_zeros.default,
    aten.embedding_dense_backward.default,
}


def may_grow(form: Form, results: Any) -> bool:
    """Return whether a result may be full and grow with the batch.

    A quick test before `mark_growth`: it runs for every operation, and few results grow.
    """
    batch = False
    for value in form.tensors:
        if value.grows or value.picked:
            return True
        batch = batch or value.shard is not None
    if not batch:
        return False
    value = results if type(results) is Value else next(iter(values_of(results)), None)
    if value is None:
        return False
    if value.shard is not None:  # e.g. z @ z.T: rows of similarities, as many columns as samples
        return value.node is not None and any(read.grows for read, _ in value.node.operands)
    return value.node is None or value.node.once or form.func in _PICKS


def values_of(results: Any) -> list[Value]:
    """Return the values among the results of an operation."""
    return [item for item in _flat(results) if type(item) is Value and item.meta is not None]


def mark_growth(form: Form, results: Any, microbatch: int) -> bool:
    """Mark the results of an operation that grow with the batch.

    Args:
        form: the operation.
        results: its results.
        microbatch: rows of a micro-batch; dimensions up to this size do not count.

    Returns:
        True if the operation copies more rows than a micro-batch out of the batch into a full tensor.
    """
    values = values_of(results)
    if not values:
        return False
    node = next((value.node for value in values if value.node is not None), None)
    read = {} if node is None else {id(v): shard for v, shard in node.operands if shard is not None}
    reads = tuple([read.get(id(value)) for value in form.tensors])
    # Without a key nothing is cached: an argument has a type whose equality is unknown.
    if form.key is None:
        return _marked(form, values, reads, microbatch)
    # Growth of the inputs is no part of `form.key`: the same call may read a gathered value or a parameter.
    grown = tuple([(value.grows, value.picked, id(value.meta)) for value in form.tensors])
    shape = tuple([(value.shard, id(value.meta)) for value in values])
    key = _Key((form.key, microbatch, reads, grown, shape))
    key.call = form, values, reads
    known = _remembered(key)
    for value, (grows, picked) in zip(values, known.results, strict=True):
        value.grows, value.picked = grows, picked
    return known.lost


class _Growth(NamedTuple):
    """Cached result of all calls of a form on values that grow alike."""

    results: list[tuple[tuple[int, ...], int]]  # `grows` and `picked`
    lost: bool
    held: tuple[Any, ...]  # keeps alive the objects whose ids are in the key, or a new one could get that id


class _Key(tuple[Any, ...]):
    """Cache key; holds the call until it is evaluated."""

    call: tuple[Form, list[Value], tuple[Shard | None, ...]] | None


@lru_cache(maxsize=1 << 12)
def _remembered(key: _Key) -> _Growth:
    call, key.call = key.call, None  # or the cache would keep values of the first block alive
    assert call is not None
    form, values, reads = call
    lost = _marked(form, values, reads, key[1])
    held = (form.func, *(value.meta for value in (*form.tensors, *values)))
    return _Growth([(value.grows, value.picked) for value in values], lost, held)


def _marked(form: Form, values: list[Value], reads: tuple[Shard | None, ...], microbatch: int) -> bool:
    dims = [_dims_read_whole(v, read, microbatch) for v, read in zip(form.tensors, reads, strict=True)]
    # e.g. x[:100] or x[0]: the arguments fix the number of rows, so doubling the batch does not change it.
    if form.func in _PICKS and len(values) == 1 and values[0].shard is None:
        _picked(form.call(), values[0], form.tensors[0], dims[0], microbatch)
        return form.tensors[0].shard is not None and bool(values[0].grows)
    picked = [value.picked for value in form.tensors]
    # e.g. a Python loop that stacks x[0], x[1], ...: each row is small, all of them are the batch.
    if form.func.overloadpacket in _JOINS and sum(picked) > microbatch and values[0].shard is None:
        values[0].grows = ((form.call().argument("dim", 0)) % max(values[0].meta.dim(), 1),)
        return True
    # The gradient of x[:100] has the size of x, although its input has not.
    if form.func in _PLACES and max(picked) and not any(dims) and values[0].shard is None:
        dim = form.call().argument("dim") % max(values[0].meta.dim(), 1)
        if values[0].meta.shape[dim] > microbatch:
            values[0].grows = (dim,)
            return True
    if any(dims):
        _grown(form, values, dims, microbatch)
    # The rest (e.g. x[0] * 2) still consists of picked rows.
    for value in values:
        if value.shard is None and not value.grows and value.meta.dim():
            value.picked = max(picked, default=0)
    return False


def _flat(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (list, tuple)) else (results,)


def _dims_read_whole(value: Value, read: Shard | None, microbatch: int) -> tuple[int, ...]:
    """Return the dimensions that grow with the batch and that an operation reads in full."""
    if value.meta is None:
        return ()
    dims = {*value.grows, *(() if value.shard is None else (value.shard.dim,))}
    return tuple(sorted(dims - ({read.dim} if read is not None else set())))


def _picked(call: Call, result: Value, source: Value, dims: tuple[int, ...], microbatch: int) -> None:
    """Mark rows that were picked by index: their number does not depend on the batch."""
    shard = source.shard
    dim = (call.argument("dim") or 0) % max(source.meta.dim(), 1)
    grows = {*dims, *(() if shard is None else (shard.dim,))}
    gone = call.func is aten.select.int
    # select removes `dim`: the dimensions behind it move to the front by one.
    rest = [other - (gone and other > dim) for other in grows - {dim}]
    if dim not in grows:
        result.picked = source.picked
    else:
        rows = 1 if gone else int(result.meta.shape[dim])
        if rows > microbatch:
            rest.append(dim)
        else:
            result.picked = rows
    result.grows = tuple(sorted(rest))


def _grown(form: Form, values: Sequence[Value], dims: Sequence[tuple[int, ...]], microbatch: int) -> None:
    larger = _larger(form, dims, microbatch)
    for index, value in enumerate(values):
        shape = tuple(value.meta.shape)
        if form.func in _RESHAPES:
            found = _reshaped(tuple(form.tensors[0].meta.shape), dims[0], shape)
        elif larger is not None and index < len(larger):
            twice = larger[index]
            found = {dim for dim, size in enumerate(shape) if dim < len(twice) and twice[dim] != size}
        else:
            found = _alike(form, dims, shape, microbatch)
        own = set() if value.shard is None else {value.shard.dim}
        value.grows = tuple(sorted(found - own))


def _larger(form: Form, dims: Sequence[tuple[int, ...]], microbatch: int) -> list[tuple[int, ...]] | None:
    """Return the shapes of the results with the growing dimensions twice as long; None if unknown."""
    unknown = any(value.meta is None for value in form.tensors)
    if unknown or form.func in _WITH_SIZES or form.func in _RESHAPES:
        return None
    doubled = [
        Value(_doubled(value.meta, grows or _of_index(value, microbatch)), value.device)
        for value, grows in zip(form.tensors, dims, strict=True)
    ]
    call = form.call()
    try:
        found = shapes(call.on(doubled))
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        if out_of_memory(error):
            raise
        return None  # e.g. a size among the arguments that the doubled input does not match
    return [tuple(item.shape) for item in _flat(found) if isinstance(item, Tensor)]


def _of_index(value: Value, microbatch: int) -> tuple[int, ...]:
    """Return the dimensions longer than a micro-batch of an integer or bool tensor: a permutation, a mask."""
    if value.shard is not None or value.has_gradient:
        return ()
    return tuple(dim for dim, size in enumerate(value.meta.shape) if size > microbatch)


def _doubled(meta: Tensor, dims: Sequence[int]) -> Tensor:
    if not dims:
        return meta
    shape = tuple(2 * size if dim in dims else size for dim, size in enumerate(meta.shape))
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return blank(shape, stride, meta.dtype)


def _reshaped(old: Sequence[int], dims: Sequence[int], new: Sequence[int]) -> set[int]:
    """Return the positions of dimensions after a reshape, matched by the number of elements before them."""
    found: set[int] = set()
    for dim in dims:
        before, through = math.prod(old[:dim]), math.prod(old[: dim + 1])
        front = 1
        for place, size in enumerate(new):
            if front < through and front * size > before and size > 1:
                found.add(place)
                break
            front *= size
    return found


def _alike(form: Form, dims: Sequence[tuple[int, ...]], shape: Sequence[int], microbatch: int) -> set[int]:
    """Guess the growing dimensions by their sizes, or by their positions; only above a micro-batch's size."""
    sizes = {value.meta.shape[dim] for value, grows in zip(form.tensors, dims, strict=True) for dim in grows}
    sizes |= {size for value in form.tensors if value.shard for size in [value.shard.rows(form.samples)]}
    found = {dim for dim, size in enumerate(shape) if size in sizes and size > microbatch}
    if found:
        return found
    places = {dim for grows in dims for dim in grows}
    return {dim for dim in places if dim < len(shape) and shape[dim] > microbatch}
