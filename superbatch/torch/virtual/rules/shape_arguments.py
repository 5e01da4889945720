"""Rules for operators that take the shape of the batch as an argument: expand, and backwards of views.

The gradient of a sum is a number expanded to the shape of the input. In the shape ``[2 * N, D]`` the samples
may occur twice (``cat([a, b])``) or have two rows each. The wrong choice would gather the gradient. So a
recording stores, by shape, the shardings of its values that do not have one row per sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, OpStrategy
from ..ir.shard import BatchSlice, Shard, microbatch_shape
from ..ir.values import Operand

aten: Any = torch.ops.aten


def expanded(call: Call, like: Shard | None = None) -> OpStrategy | None:
    """Return a strategy for expand; None if no dimension of the result belongs to the samples.

    `like` is the sharding of a recorded value with the shape of the result; None if unknown.
    """
    value = call.tensors[0]
    size, dims = list(call.argument("size")), value.meta.dim()
    new = len(size) - dims
    if value.shard is not None:
        output = value.shard.at(value.shard.dim + new)
        if size[output.dim] not in (-1, output.rows(call.samples)):
            return None  # repeats a batch of one sample
    else:
        # A full value is repeated for each sample; per micro-batch this needs no memory for the whole batch.
        spread = [
            dim
            for dim, rows in enumerate(size)
            if rows not in (-1, 0, 1)
            and rows % call.samples == 0
            and (dim < new or value.meta.shape[dim - new] == 1)
        ]
        if not spread:
            return None
        # A size of N is more likely that of the samples than a multiple of N. Of several, the first is taken.
        dim = min(spread, key=lambda dim: (size[dim] != call.samples, dim))
        output = Shard(dim, 1, size[dim] // call.samples)
        if like is not None and like.dim in spread:
            output = like

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        return tensors[0].expand(microbatch_shape(size, output, microbatch))

    return OpStrategy([Operand(value, value.shard)], [output], run, view=True, light=True)


def backward_of_a_view(call: Call) -> OpStrategy | None:
    """Rule for backwards of views, which take the shape of the forward's input as an argument."""
    value = call.tensors[0] if call.tensors else None
    if value is None or value.shard is None:
        return None
    shard = value.shard
    sizes = list(call.argument("input_sizes"))
    packet = call.func.overloadpacket
    if packet is aten.diagonal_backward:
        # diagonal() removed two dimensions. They are inserted in ascending order, and may shift the samples.
        dims = sorted(call.argument(name) % len(sizes) for name in ("dim1", "dim2"))
        new_dim = shard.dim + (dims[0] <= shard.dim)
        new_dim += dims[1] <= new_dim
    else:
        dims = [(call.argument("dim") or 0) % len(sizes)]
        new_dim = shard.dim + (packet is aten.select_backward and dims[0] <= shard.dim)
    if packet is aten.slice_backward and dims == [new_dim]:
        return _backward_of_blocks(call, shard, sizes)
    if new_dim in dims or new_dim >= len(sizes) or sizes[new_dim] != shard.rows(call.samples):
        return None
    output = shard.at(new_dim)

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        args, kwargs = call.replaced(input_sizes=microbatch_shape(sizes, output, microbatch))
        return call.func(tensors[0], *args[1:], **kwargs)

    return OpStrategy([Operand(value, shard)], [output], run)


def _backward_of_blocks(call: Call, shard: Shard, sizes: list[int]) -> OpStrategy | None:
    """Return a strategy for the gradient of ``cat([a, b])[:N]``, which is ``cat([grad, zeros])``."""
    dim, rows = shard.dim, sizes[shard.dim]
    block = call.samples * shard.inner
    start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(rows)
    if call.argument("step", 1) != 1 or not block or start % block or stop % block or rows % block:
        return None
    if stop - start != shard.rows(call.samples):
        return None
    output = Shard(dim, rows // block, shard.inner)
    first, last = start // block, stop // block

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        block = microbatch.samples * shard.inner  # rows of a block in this micro-batch
        return aten.slice_backward(
            tensors[0], microbatch_shape(sizes, output, microbatch), dim, first * block, last * block, 1
        )

    return OpStrategy([Operand(call.tensors[0], shard)], [output], run)
