"""Rules for operators that take the shape of the batch as an argument: expand, and backwards of views.

The gradient of a sum is a number expanded to the shape of the input. In ``[2 * N, D]`` the samples may come
twice (``cat([a, b])``) or have two rows each; the wrong choice would gather the gradient. So a recording
stores the layouts of its values by shape, if they differ from one row per sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ir.calls import Call, Recipe
from ..ir.layout import Layout, Part, sized
from ..ir.values import Operand

aten: Any = torch.ops.aten


def expanded(call: Call, like: Layout | None = None) -> Recipe | None:
    """Return a recipe for expand; None if it does not follow the samples.

    Args:
        call: call of `expand`.
        like: layout of a value with the same shape; None: unknown.
    """
    value = call.tensors[0]
    size, dims = list(call.argument("size")), value.meta.dim()
    new = len(size) - dims
    if value.layout is not None:
        output = value.layout.at(value.layout.dim + new)
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
        output = Layout(dim, 1, size[dim] // call.samples)
        if like is not None and like.dim in spread:
            output = like

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        return tensors[0].expand(sized(size, output, part))

    return Recipe([Operand(value, value.layout)], [output], run, view=True, light=True)


def backward_of_a_view(call: Call) -> Recipe | None:
    """Rule for select_backward, slice_backward and others, which take the shape of their forward's input."""
    value = call.tensors[0] if call.tensors else None
    if value is None or value.layout is None:
        return None
    layout = value.layout
    sizes = list(call.argument("input_sizes"))
    packet = call.func.overloadpacket
    if packet is aten.diagonal_backward:
        # The diagonal lost two dimensions, which come back in ascending order: each may move the samples.
        dims = sorted(call.argument(name) % len(sizes) for name in ("dim1", "dim2"))
        place = layout.dim + (dims[0] <= layout.dim)
        place += dims[1] <= place
    else:
        dims = [(call.argument("dim") or 0) % len(sizes)]
        place = layout.dim + (packet is aten.select_backward and dims[0] <= layout.dim)
    if packet is aten.slice_backward and dims == [place]:
        return _backward_of_blocks(call, layout, sizes)
    if place in dims or place >= len(sizes) or sizes[place] != layout.rows(call.samples):
        return None
    output = layout.at(place)

    def run(part: Part, tensors: list[Tensor]) -> Any:
        args, kwargs = call.replaced(input_sizes=sized(sizes, output, part))
        return call.func(tensors[0], *args[1:], **kwargs)

    return Recipe([Operand(value, layout)], [output], run)


def _backward_of_blocks(call: Call, layout: Layout, sizes: list[int]) -> Recipe | None:
    """Return a recipe for the gradient of ``z[:N]``, ``z = cat([a, b])``: one block, and a block of zeros."""
    dim, rows = layout.dim, sizes[layout.dim]
    block = call.samples * layout.inner
    start, stop, _ = slice(call.argument("start"), call.argument("end")).indices(rows)
    if call.argument("step", 1) != 1 or not block or start % block or stop % block or rows % block:
        return None
    if stop - start != layout.rows(call.samples):
        return None
    output = Layout(dim, rows // block, layout.inner)
    first, last = start // block, stop // block

    def run(part: Part, tensors: list[Tensor]) -> Tensor:
        here = part.samples * layout.inner  # size of a block in this micro-batch
        return aten.slice_backward(tensors[0], sized(sizes, output, part), dim, first * here, last * here, 1)

    return Recipe([Operand(call.tensors[0], layout)], [output], run)
