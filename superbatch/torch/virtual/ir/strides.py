"""Canonical strides for kernels that misread the strides of a dimension of size one.

PyTorch allows any stride in a dimension of size one, but some kernels choose their memory format by that
stride. An example is a gradient of one image with strides ``(C, 1, W * C, C)``. `Tensor.is_contiguous` skips
dimensions of size one, and finds channels-last order. `suggest_memory_format` does not skip them, and finds
the usual order. So the kernel reads the gradient in the wrong order. A batch never has such strides; a
micro-batch of one sample often has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .shard import BatchSlice
from .values import Run

aten: Any = torch.ops.aten
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def canonical(tensor: Tensor) -> Tensor:
    """Return the tensor with the strides of a new one in its dimensions of size one.

    The result is a view, or the tensor itself if its strides are canonical.

    Examples:
        >>> image = torch.empty(60).as_strided((1, 3, 4, 5), (3, 1, 15, 3))
        >>> canonical(image).stride()
        (60, 1, 15, 3)
    """
    shape = tensor.shape
    if 1 not in shape or 0 in shape:  # true for nearly all tensors, and checked before every convolution
        return tensor
    strides = tensor.stride()
    new = _canonical(shape, strides)
    return tensor if new == strides else tensor.as_strided(shape, new)


@lru_cache(maxsize=1 << 12)
def _canonical(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    dims = len(shape)
    orders = [tuple(range(dims)), *([_last(dims)] if dims in _CHANNELS_LAST else [])]
    for dense in (_dense(shape, order) for order in orders):
        # Channels-last is second: a tensor that fits both orders gets the usual one.
        if all(size == 1 or step == new for size, step, new in zip(shape, strides, dense, strict=True)):
            return dense
    # A slice is dense in neither order. Its dimensions of size one get a stride beyond all others. The last
    # dimension gets stride 1, which kernels check.
    reach = max((size * step for size, step in zip(shape, strides, strict=True) if size > 1), default=1)
    found = [reach if size == 1 else step for size, step in zip(shape, strides, strict=True)]
    return (*found[:-1], 1 if shape[-1] == 1 else found[-1])


def _last(dims: int) -> tuple[int, ...]:
    """Return the dimensions in channels-last order, outermost first."""
    return (0, *range(2, dims), 1)


@lru_cache(maxsize=1 << 12)
def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor with dimensions in this memory order, outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def with_canonical_strides(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a kernel with canonical strides for each of its positional tensors."""

    def called(*args: Any) -> Any:
        return kernel(*[canonical(arg) if isinstance(arg, Tensor) else arg for arg in args])

    return called


class _Order(NamedTuple):
    """Memory order of a full tensor.

    Attributes:
        memory_format: format in which it is contiguous; None if it is not, or has fewer than two dimensions.
        unit_stride: the last dimension has stride 1.
    """

    memory_format: torch.memory_format | None
    unit_stride: bool


def _order_of(meta: Tensor) -> _Order:
    formats = [torch.contiguous_format, _CHANNELS_LAST.get(meta.dim())] if meta.dim() > 1 else []
    matching = (one for one in formats if one is not None and meta.is_contiguous(memory_format=one))
    return _Order(next(matching, None), bool(meta.dim() > 1 and meta.stride(-1) == 1))


def _in_order(tensor: Tensor, order: _Order) -> Tensor:
    # A copy only if the micro-batch has another order: rows cut from several outer blocks are strided.
    memory_format, unit_stride = order
    if memory_format is None:
        if unit_stride and tensor.stride(-1) != 1:
            return tensor.contiguous()
        return canonical(tensor)
    if not tensor.is_contiguous(memory_format=memory_format):
        return tensor.contiguous(memory_format=memory_format)
    if 1 not in tensor.shape or 0 in tensor.shape:
        return tensor
    # `is_contiguous` ignores the strides of dimensions of size one, but kernels may read them.
    dims = tuple(range(tensor.dim()))
    strides = _dense(tensor.shape, dims if memory_format is torch.contiguous_format else _last(len(dims)))
    return tensor if strides == tensor.stride() else tensor.as_strided(tensor.shape, strides)


def in_batch_order(metas: Sequence[Tensor], run: Run) -> Run:
    """Return `run` for kernels that need the rows of a micro-batch in the memory order of the batch."""
    # Once per strategy, because the order of the batch does not depend on the micro-batch.
    orders = [_order_of(meta) for meta in metas]

    def ordered(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        return run(microbatch, [_in_order(x, order) for x, order in zip(tensors, orders, strict=True)])

    return ordered


def with_kernel_strides(operator: Any, metas: Sequence[Tensor], run: Run) -> Run:
    """Return `run`, changed to pass the strides that the operator's kernel needs, if it needs any."""
    packet = operator.overloadpacket
    if packet in _IN_ORDER:
        return in_batch_order(metas, run)
    if packet in _CANONICAL:
        return lambda microbatch, tensors: run(microbatch, [canonical(tensor) for tensor in tensors])
    return run


# Both sets were found by running all operators of the tests with strides of each kind (docs/decisions/0031).
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
