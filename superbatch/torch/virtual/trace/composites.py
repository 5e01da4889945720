"""Operators recorded as several operations: means, BatchNorm, recurrent layers, lists of views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from superbatch.torch.memory.out_of_memory import out_of_memory

from ..ir.calls import Call, mapped, substituted
from ..ir.recorder import Recorder
from ..ir.shard import Shard
from ..rules.decompositions import decomposition
from . import batch_norm, indexing, recurrent
from .aliases import view
from .paranoia import WrongRuleError

aten: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def _shard(recording: Recorder, tensor: Any) -> Shard | None:
    return recording.value(tensor).shard if isinstance(tensor, Tensor) else None


# -- means --------------------------------------------------------------------------------------------------


def _mean(recording: Recorder, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Return a mean over samples as a sum that is divided once, by the number of all elements."""
    count = x.dim()
    dims = (
        range(count)
        if dim is None or dim == []
        else [d % count for d in ([dim] if isinstance(dim, int) else dim)]
    )
    shard = _shard(recording, x)
    kind = dtype or x.dtype  # for integers the operator itself has to raise
    if shard is None or shard.dim not in dims or not (kind.is_floating_point or kind.is_complex):
        return NotImplemented
    wide = torch.float32 if kind in _HALF else dtype  # a float16 sum over the batch could overflow
    total = aten.sum.dim_IntList(x, list(dims), keepdim, dtype=wide)
    return (total / math.prod(x.shape[d] for d in dims)).to(kind)


def _nll_loss_forward(
    recording: Recorder, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> Any:
    """Return (loss, sum of weights); a mean is the sum of losses, divided once by the sum of weights."""
    if _shard(recording, x) is None:
        return NotImplemented
    forward = aten.nll_loss2d_forward if x.dim() == 4 else aten.nll_loss_forward
    how = 2 if reduction else 0  # a sum, because a mean would be divided by the weights of the micro-batch
    total, _ = recording.wrapped(
        recording.compute(forward.default, *recording.values((x, target, weight, how, ignore_index), {}))
    )
    if reduction == 0:  # the sum of weights is 0, as in torch; a recorded sum would be a coupling point
        return total, torch.zeros((), dtype=x.dtype, device=x.device)
    # From the targets alone, so that the backward does not wait for the sweep of the forward.
    counts = target != ignore_index
    if weight is None:
        weights = counts.sum().to(x.dtype)
    else:
        # Clamped, because ignore_index (-100) is no index of a weight; `counts` masks these targets.
        target_weights = aten.embedding(weight.unsqueeze(1), target.clamp(0, weight.shape[0] - 1)).squeeze(-1)
        weights = (target_weights * counts).sum()
    return (total / weights if reduction == 1 else total), weights


# -- lists of views -----------------------------------------------------------------------------------------


def _slices(recording: Recorder, x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    # One slice per result, because `view` records single views.
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        view(recording, x, aten.slice.Tensor, (dim, start, start + size), {})
        for start, size in zip(starts, sizes, strict=True)
    ]


def _split(recording: Recorder, x: Any, size: int, dim: int = 0) -> list[Any]:
    rows = x.shape[dim]
    # An empty tensor is split into one empty tensor.
    return _slices(recording, x, [min(size, rows - start) for start in range(0, rows, size)] or [0], dim)


def _split_with_sizes(recording: Recorder, x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    return _slices(recording, x, sizes, dim)


def _unbind(recording: Recorder, x: Any, dim: int = 0) -> list[Any]:
    return [view(recording, x, aten.select.int, (dim, index), {}) for index in range(x.shape[dim])]


LISTS: dict[Any, Callable[..., list[Any]]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
}


COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.mean: _mean,
    aten.nll_loss_forward: _nll_loss_forward,
    aten.nll_loss2d_forward: _nll_loss_forward,
    aten.index.Tensor: indexing.index,
    aten.index_put: indexing.index_put,
    aten.native_batch_norm: batch_norm.forward,
    aten.cudnn_batch_norm: batch_norm.cudnn_forward,
    aten.native_batch_norm_backward: batch_norm.backward,
    aten.cudnn_batch_norm_backward: batch_norm.cudnn_backward,
    aten._cudnn_rnn: recurrent.forward,
    aten._cudnn_rnn_backward: recurrent.backward,
}


def attempt(recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the composite of an operation; return NotImplemented if there is none for these arguments."""
    composite = composite_of(func)
    if composite is None:
        return NotImplemented
    for arg in args:  # also those that the composite does not read
        mapped(arg, recording.register_leaves)
    return composite(recording, *args, **kwargs)


@cache
def composite_of(func: Any) -> Callable[..., Any] | None:
    """Return the composite of an operator; None if it has none."""
    return COMPOSITES.get(func) or COMPOSITES.get(func.overloadpacket)


def decomposed(recording: Recorder, call: Call) -> Any:
    """Run torch's decomposition of an operation on virtual tensors; return NotImplemented if it fails."""
    simpler = decomposition(call.func)
    if simpler is None:
        return NotImplemented
    tensors = [recording.wrap(value) for value in call.tensors]
    args, kwargs = substituted(call.args, call.kwargs, call.paths, tensors)
    try:
        return simpler(*args, **kwargs)
    except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
        # A decomposition may read numbers, or strides that differ; the caller then gathers the inputs.
        if out_of_memory(error) or isinstance(error, WrongRuleError):
            raise
        return NotImplemented
