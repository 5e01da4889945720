# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Assignment of rows to micro-batches, in one or two groups of micro-batches of the same size.

A group of k micro-batches is one loop, which XLA compiles once for any k. Micro-batch i of a *strided* group
has the rows ``i, i + k, i + 2k, ...`` of the group. If the batch is sharded over devices in contiguous
blocks, each device then holds its share of every micro-batch. A *contiguous* micro-batch would lie on one or
two devices, so XLA would gather the whole batch on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import InputError, SplitError
from ..integers import positive_int

Layout = Literal["strided", "contiguous"]


@dataclass(frozen=True)
class Group:
    """A group of `count` micro-batches of `size` rows each.

    The first row of the group is `start`; the index of its first micro-batch is `first`.
    """

    count: int
    size: int
    start: int
    first: int


def groups(samples: int, *, microbatch_size: int | None = None, steps: int | None = None) -> list[Group]:
    """Divide a batch into micro-batches of one size and a smaller last one, or into `steps` near-equal ones.

    Args:
        samples: the rows of the batch.
        microbatch_size: rows of each micro-batch but the last.
        steps: the number of micro-batches; their sizes differ by at most one.

    Raises:
        SplitError: there are fewer samples than `steps`, or none.

    Examples:
        >>> from dataclasses import astuple
        >>> [astuple(group) for group in groups(10, microbatch_size=4)]
        [(2, 4, 0, 0), (1, 2, 8, 2)]
        >>> [astuple(group) for group in groups(10, steps=4)]
        [(2, 3, 0, 0), (2, 2, 6, 2)]
    """
    if samples < (steps or 1):
        raise SplitError(
            f"A batch of {samples} samples{f' for steps={steps}' if steps else ''} is too small: every "
            f"micro-batch needs a sample. Pass a larger batch{' or fewer steps' if steps else ''}."
        )
    if steps is not None:
        size, larger = divmod(samples, steps)
        counts = [(larger, size + 1), (steps - larger, size)]
    else:
        assert microbatch_size is not None
        full, tail = divmod(samples, microbatch_size)
        counts = [(full, microbatch_size), (1, tail)]
    divided: list[Group] = []
    start = first = 0
    for count, size in counts:
        if count and size:  # no tail, or no micro-batch of the larger size
            divided.append(Group(count, size, start, first))
            start, first = start + count * size, first + count
    return divided


def check_split(microbatch_size: int | None, steps: int | None, layout: str) -> None:
    """Check the options that divide a batch.

    Raises:
        InputError: both or neither of `microbatch_size` and `steps` are given, the one given is not a
            positive int, or the layout is unknown.

    Examples:
        >>> check_split(8, None, "strided")
    """
    if (microbatch_size is None) == (steps is None):
        raise InputError(
            f"microbatch_size={microbatch_size!r} and steps={steps!r}, but exactly one of them is needed. "
            "Pass microbatch_size= (rows of a micro-batch) or steps= (the number of micro-batches)."
        )
    name, value = ("microbatch_size", microbatch_size) if steps is None else ("steps", steps)
    positive_int(name, value)
    if layout not in ("strided", "contiguous"):
        raise InputError(
            f'layout={layout!r} is unknown. Pass layout="strided" (keeps sharded rows on their devices) or '
            'layout="contiguous".'
        )


def check_real(real: Any, layout: str) -> None:
    """Check `num_real_microbatches`, which may be traced.

    Raises:
        InputError: it is not a scalar integer, or the layout is not ``"contiguous"``.

    Examples:
        >>> check_real(3, "contiguous")
    """
    if real is None:
        return
    array = None if isinstance(real, bool) or not isinstance(real, SupportsIndex | jax.Array) else real
    if array is None or jnp.shape(array) != () or not jnp.issubdtype(jnp.result_type(array), jnp.integer):
        raise InputError(
            f"num_real_microbatches={real!r} is not a scalar integer. Pass an int or a scalar "
            "array of integers."
        )
    if layout != "contiguous":
        raise InputError(
            f"num_real_microbatches= needs padding at the end, but with layout={layout!r} every micro-batch "
            'gets some of the padding. Pass layout="contiguous".'
        )


def refuse_more_than_there_are(real: Any, division: Sequence[Group]) -> None:
    """Raise if `num_real_microbatches` is larger than the number of micro-batches; skip a traced one.

    Raises:
        InputError: it is larger, or negative.

    Examples:
        >>> refuse_more_than_there_are(3, groups(10, microbatch_size=4))
    """
    count = sum(group.count for group in division)
    if real is not None and not isinstance(real, jax.core.Tracer) and not 0 <= int(real) <= count:
        raise InputError(
            f"num_real_microbatches={int(real)}, but the batch has {count} micro-batches. Pass 0 to {count}."
        )


def cutter(
    arrays: Sequence[Any], group: Group, layout: Layout, axes: Sequence[int]
) -> Callable[[Any], list[Any]]:
    """Return a function from the index of a micro-batch in its group to its rows of every array.

    The batch is indexed, not transposed, so that it is not copied.

    Args:
        arrays: the arrays of the batch.
        group: the group.
        layout: the assignment of rows to micro-batches.
        axes: the axis of the rows in each array.

    Examples:
        >>> cut = cutter([jnp.arange(6)], Group(count=3, size=2, start=0, first=0), "strided", [0])
        >>> cut(0)[0].tolist(), cut(1)[0].tolist()
        ([0, 3], [1, 4])
    """
    strided = layout == "strided"
    # Reshape the axis of the rows to two axes; the index of the micro-batch selects along one of them.
    shape = (group.size, group.count) if strided else (group.count, group.size)

    def arranged(leaf: Any, axis: int) -> Any:
        leaf = jnp.asarray(leaf)
        rows = group.count * group.size
        _refuse_to_move(leaf, axis, group, layout)
        if rows != leaf.shape[axis]:
            leaf = lax.slice_in_dim(leaf, group.start, group.start + rows, axis=axis)
        return leaf.reshape(leaf.shape[:axis] + shape + leaf.shape[axis + 1 :])

    ready = [arranged(leaf, axis) for leaf, axis in zip(arrays, axes, strict=True)]

    def cut(index: Any) -> list[Any]:
        return [
            lax.dynamic_index_in_dim(leaf, index, axis + strided, keepdims=False)
            for leaf, axis in zip(ready, axes, strict=True)
        ]

    return cut


def _refuse_to_move(leaf: Any, axis: int, group: Group, layout: Layout) -> None:
    """Raise if rows would have to move between devices of an explicit mesh.

    On other meshes XLA gathers the rows on every device. On an explicit mesh JAX would raise a type error.

    Raises:
        SplitError: the devices do not hold equal shares of every micro-batch.
    """
    sharding = jax.typeof(leaf).sharding
    over = sharding.spec[axis] if axis < len(sharding.spec) else None
    if over is None:
        return  # on one device, or on a mesh whose axes XLA handles
    axes = over if isinstance(over, tuple) else (over,)
    devices = math.prod(sharding.mesh.shape[name] for name in axes)
    whole = "or let every device have the whole batch: jax.sharding.reshard(batch, jax.P())"
    if layout == "contiguous":
        raise SplitError(
            f'layout="contiguous" takes each micro-batch from one block of rows, which is on one device if '
            f'rows are sharded over {over!r} of an explicit mesh. Pass layout="strided", {whole}.'
        )
    if group.count * group.size != leaf.shape[axis] or group.size % devices:
        raise SplitError(
            f"Micro-batches of {group.size} rows do not divide {leaf.shape[axis]} rows evenly among the "
            f"{devices} devices of an explicit mesh that shards them over {over!r}. Pass a microbatch_size "
            f"that is a multiple of {devices} and divides the batch, {whole}."
        )


def rows_in_order(stacked: Any, layout: Layout) -> Any:
    """Return the outputs of a group, of shape [count, size, ...], as rows in the order of the batch.

    Examples:
        >>> rows_in_order(jnp.array([[0, 3], [1, 4], [2, 5]]), "strided").tolist()
        [0, 1, 2, 3, 4, 5]
    """

    def one(leaf: Any) -> Any:
        if layout == "strided":
            leaf = jnp.swapaxes(leaf, 0, 1)
        return leaf.reshape((-1, *leaf.shape[2:]))

    return jax.tree.map(one, stacked)
