"""Rules for operators that take the shape of the batch as an argument: expand, and backwards of views.

The gradient of a sum is a number expanded to the shape of the input. In ``[2 * N, D]`` the samples may come
twice (``cat([a, b])``) or have two rows each; the wrong choice would gather the gradient. So a recording
stores the shardings of its values by shape, if they differ from one row per sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, OpStrategy
from ..ir.shard import Part, Shard, sized
from ..ir.values import Operand

aten: Any = torch.ops.aten


def expanded(call: Call, like: Shard | None = None) -> OpStrategy | None:
    """Return a strategy for expand; None if it does not follow the samples.

    Args:
        call: call of `expand`.
        like: sharding of a value with the same shape; None: unknown.
    """
    value = call.tensors[0]
    size, dims = list(call.argument("size")), value.meta.dim()
    new = len(size) - dims
    if value.shard is not None:
        output = value.shard.at(value.shard.dim + new)
        if size[output.dim] not in (-1, output.rows(call.samples)):
            return None  # a batch of one sample that is repeated
    else:
        # A full value repeated for each sample: expanded per micro-batch, it takes no memory of the batch.
        spread = [
            dim
            for dim, rows in enumerate(size)
            if rows not in (-1, 0, 1)
            and rows % call.samples == 0
            and (dim < new or value.meta.shape[dim - new] == 1)
        ]
        if not spread:
            return None
        # A dimension of exactly N is more likely that of the samples than a multiple of N; then the first
        # one.
        dim = min(spread, key=lambda dim: (size[dim] != call.samples, dim))
        output = Shard(dim, 1, size[dim] // call.samples)
        if like is not None and like.dim in spread:
            output = like

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        return tensors[0].expand(sized(size, output, part))

    return OpStrategy([Operand(value, value.shard)], [output], run, view=True, light=True)


def backward_of_a_view(call: Call) -> OpStrategy | None:
    """Rule for select_backward, slice_backward and others, which take the shape of their forward's input."""
    value = call.tensors[0] if call.tensors else None
    if value is None or value.shard is None:
        return None
    shard = value.shard
    sizes = list(call.argument("input_sizes"))
    packet = call.func.overloadpacket
    if packet is aten.diagonal_backward:
        # The diagonal lost two dimensions, which come back in ascending order: each may move the samples.
        dims = sorted(call.argument(name) % len(sizes) for name in ("dim1", "dim2"))
        place = shard.dim + (dims[0] <= shard.dim)
        place += dims[1] <= place
    else:
        dims = [(call.argument("dim") or 0) % len(sizes)]
        place = shard.dim + (packet is aten.select_backward and dims[0] <= shard.dim)
    if packet is aten.slice_backward and dims == [place]:
        return _backward_of_blocks(call, shard, sizes)
    if place in dims or place >= len(sizes) or sizes[place] != shard.rows(call.samples):
        return None
    output = shard.at(place)

    def run(part: Part, tensors: list[Tensor]) -> Any:
        args, kwargs = call.replaced(input_sizes=sized(sizes, output, part))
        return call.func(tensors[0], *args[1:], **kwargs)

    return OpStrategy([Operand(value, shard)], [output], run)


def _backward_of_blocks(call: Call, shard: Shard, sizes: list[int]) -> OpStrategy | None:
    """Return a strategy for the gradient of ``z[:N]``, ``z = cat([a, b])``: a block, and a block of zeros."""
    dim, rows = shard.dim, sizes[shard.dim]
    block = call.samples * shard.inner
    start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(rows)
    if call.argument("step", 1) != 1 or not block or start % block or stop % block or rows % block:
        return None
    if stop - start != shard.rows(call.samples):
        return None
    output = Shard(dim, rows // block, shard.inner)
    first, last = start // block, stop // block

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        here = part.samples * shard.inner  # size of a block in this micro-batch
        return aten.slice_backward(tensors[0], sized(sizes, output, part), dim, first * here, last * here, 1)

    return OpStrategy([Operand(call.tensors[0], shard)], [output], run)
