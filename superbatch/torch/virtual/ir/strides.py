"""Canonical strides for kernels that misread the strides of a dimension of size one.

The stride of a dimension of size one has no meaning, and PyTorch lets it be anything. Some kernels choose
their memory format by it all the same. The gradient of one image with strides ``(C, 1, W * C, C)`` counts as
contiguous in channels-last order, because `Tensor.is_contiguous` skips dimensions of size one, and as
contiguous in the usual order, because `suggest_memory_format` does not skip them. The kernel reads it in the
wrong one. A whole batch never has such strides; a micro-batch of one sample often has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import Part
from .values import Run

aten: Any = torch.ops.aten
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def canonical(tensor: Tensor) -> Tensor:
    """Return the same memory with the strides of dimensions of size one as a new tensor would have them.

    A tensor without such a dimension, or with such strides already, is returned as it is.

    Examples:
        >>> image = torch.empty(60).as_strided((1, 3, 4, 5), (3, 1, 15, 3))
        >>> canonical(image).stride()
        (60, 1, 15, 3)
    """
    shape = tensor.shape
    if 1 not in shape or 0 in shape:
        return tensor
    strides = tensor.stride()
    found = _canonical(shape, strides)
    return tensor if found == strides else tensor.as_strided(shape, found)


@lru_cache(maxsize=1 << 12)
def _canonical(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    dims = len(shape)
    orders = [tuple(range(dims)), *([_last(dims)] if dims in _CHANNELS_LAST else [])]
    for dense in (_dense(shape, order) for order in orders):
        if all(size == 1 or step == new for size, step, new in zip(shape, strides, dense, strict=True)):
            return dense
    # Neither: outside of all others, or numbers side by side in the last dimension.
    reach = max((size * step for size, step in zip(shape, strides, strict=True) if size > 1), default=1)
    found = [reach if size == 1 else step for size, step in zip(shape, strides, strict=True)]
    return (*found[:-1], 1 if shape[-1] == 1 else found[-1])


def _last(dims: int) -> tuple[int, ...]:
    """Dimensions with the channels last, outermost first."""
    return (0, *range(2, dims), 1)


@lru_cache(maxsize=1 << 12)
def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new tensor with its dimensions in this order, outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def with_canonical_strides(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a kernel with canonical strides of each tensor among its arguments.

    Args:
        kernel: takes tensors by position.
    """

    def called(*args: Any) -> Any:
        return kernel(*[canonical(arg) if isinstance(arg, Tensor) else arg for arg in args])

    return called


class _Order(NamedTuple):
    """Order of a whole tensor in memory.

    Attributes:
        memory_format: in which it is contiguous; None: in none, or it has fewer than two dimensions.
        last: the numbers of its last dimension lie side by side.
    """

    memory_format: torch.memory_format | None
    last: bool


def _order_of(meta: Tensor) -> _Order:
    formats = [torch.contiguous_format, _CHANNELS_LAST.get(meta.dim())] if meta.dim() > 1 else []
    found = (one for one in formats if one is not None and meta.is_contiguous(memory_format=one))
    return _Order(next(found, None), bool(meta.dim() > 1 and meta.stride(-1) == 1))


def _in_order(tensor: Tensor, order: _Order) -> Tensor:
    memory_format, last = order
    if memory_format is None:
        if last and tensor.stride(-1) != 1:
            return tensor.contiguous()
        return canonical(tensor)
    if not tensor.is_contiguous(memory_format=memory_format):
        return tensor.contiguous(memory_format=memory_format)
    if 1 not in tensor.shape or 0 in tensor.shape:
        return tensor
    dims = tuple(range(tensor.dim()))
    found = _dense(tensor.shape, dims if memory_format is torch.contiguous_format else _last(len(dims)))
    return tensor if found == tensor.stride() else tensor.as_strided(tensor.shape, found)


def in_order(metas: Sequence[Tensor], run: Run) -> Run:
    """Return a function that gives `run` the rows of a micro-batch in the order of the whole tensors.

    For kernels that read memory as if it were in that order, or refuse another.

    Args:
        metas: the whole tensors, without memory.
        run: takes rows of each of them.
    """
    orders = [_order_of(meta) for meta in metas]

    def ordered(part: Part, tensors: list[Tensor]) -> Any:
        return run(part, [_in_order(x, order) for x, order in zip(tensors, orders, strict=True)])

    return ordered


def careful(operator: Any, metas: Sequence[Tensor], run: Run) -> Run:
    """Return a function that gives an operator's kernel the strides it needs: mostly `run` itself.

    Args:
        operator: overload of an operator.
        metas: of its tensors: the whole ones, without memory.
        run: calls it.
    """
    packet = operator.overloadpacket
    if packet in _IN_ORDER:
        return in_order(metas, run)
    if packet in _CANONICAL:
        return lambda part, tensors: run(part, [canonical(tensor) for tensor in tensors])
    return run


# Found by a sweep over all operators of the tests, with strides of each kind (see docs/decisions/0031).
_CANONICAL = {
    aten._convolution,
    aten.convolution,
    aten.convolution_backward,
    aten.mkldnn_convolution,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
}
_IN_ORDER = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten.adaptive_max_pool3d_backward,
    aten.fractional_max_pool2d_backward,
    aten.fractional_max_pool3d_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.nll_loss2d_backward,
    aten.nll_loss2d_forward,
}
