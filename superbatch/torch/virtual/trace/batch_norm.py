r"""BatchNorm over the whole batch, micro-batch by micro-batch.

One sweep combines mean and variance (`Moments`), then torch's kernel for given statistics normalises each
micro-batch. In the backward, one sweep computes two sums. With :math:`\hat x = (x - \mu) r`,
:math:`r = (v+\epsilon)^{-1/2}`, n values per channel, :math:`d\beta = \sum dy` and
:math:`d\gamma = \sum dy\,\hat x`, the gradient is
:math:`dx = \gamma r\,[dy - d\beta / n - \hat x\,d\gamma / n]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import OpStrategy, meta_tensor
from ..ir.recorder import Recorder
from ..ir.reductions import First, Moments
from ..ir.shard import PARTIAL, REPLICATE, BatchSlice, Shard
from ..ir.strides import with_canonical_strides
from ..ir.values import Operand, Run, Value

aten: Any = torch.ops.aten
# `_op` is the C++ function; `OpOverload.__call__` would add a Python frame to each call.
_kernel = with_canonical_strides(aten.native_batch_norm.default._op)
_backward_kernel = with_canonical_strides(aten.native_batch_norm_backward.default._op)


def _optional_value(recording: Recorder, tensor: Any) -> Value | None:
    return None if tensor is None else recording.value(tensor)


def _optional_operands(values: list[Value | None]) -> tuple[list[Operand], list[int | None]]:
    """Return operands for the values that are not None, and the position of each value among them."""
    operands: list[Operand] = []
    positions: list[int | None] = []
    for value in values:
        positions.append(None if value is None else len(operands))
        if value is not None:
            operands.append(Operand(value, REPLICATE))
    return operands, positions


def _picked(tensors: list[Tensor], positions: Sequence[int | None], first: int) -> list[Any]:
    return [None if position is None else tensors[first + position] for position in positions]


def _shard_of(value: Value) -> Shard | None:
    """Return the sharding if the samples are in dimension 0, else None."""
    shard = value.shard
    return shard if shard is not None and shard.dim == 0 else None


def forward(
    recording: Recorder,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """`native_batch_norm`: (output, mean, 1 / standard deviation)."""
    value = recording.value(x)
    shard = _shard_of(value)
    affine = [_optional_value(recording, weight), _optional_value(recording, bias)]
    ranks = recording.ranks
    if ranks is not None and ranks.normalises and training:
        shard = shard or ranks.shard_of(recording, value)
    # InstanceNorm repeats weight and bias for each sample, so that they are sharded.
    if shard is None or any(v is not None and v.shard is not None for v in affine):
        return _samples_in_channels(
            recording, x, (weight, bias, running_mean, running_var, training, momentum, eps)
        )
    if not training:  # with given statistics the samples are not coupled
        running = [_optional_value(recording, running_mean), _optional_value(recording, running_var)]
        operands, positions = _optional_operands([*affine, *running])

        def frozen(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            w, b, mean, var = _picked(tensors, positions, 1)
            return _kernel(tensors[0], w, b, mean, var, False, 0.0, eps)

        strategy = OpStrategy(
            [Operand(value, shard), *operands], [shard, PARTIAL, PARTIAL], frozen, First, light=True
        )
        # In eval mode the kernel returns no batch statistics.
        empty = meta_tensor((0,), (1,), value.meta.dtype)
        return recording.wrapped(recording.add("batch_norm", strategy, [value.meta, empty, empty]))
    mean, invstd, var, unbiased = _statistics(recording, value, shard, affine[0], eps)
    if running_mean is not None:  # updated once per batch, with the unbiased variance of all n values
        _update(recording, running_mean, mean, momentum)
        _update(recording, running_var, unbiased, momentum)
    operands, positions = _optional_operands([*affine, mean, var])
    run = _normalised(tuple(positions), eps)
    strategy = OpStrategy([Operand(value, shard), *operands], [shard], run, light=True)
    output = recording.add("batch_norm", strategy, value.meta, compilable=True)
    return recording.wrapped([output, mean, invstd])


# `_normalised`, `_moments` and `_sums` return cached functions, so that equal layers share a compiled
# segment: segments compare functions by identity.


@lru_cache(maxsize=1 << 10)
def _normalised(positions: tuple[int | None, ...], eps: float) -> Run:
    def normalised(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        w, b, mean, var = _picked(tensors, positions, 1)
        return _kernel(tensors[0], _like(w, mean), _like(b, mean), mean, var, False, 0.0, eps)[0]

    return normalised


def _statistics(
    recording: Recorder, value: Value, shard: Shard, weight: Value | None, eps: float
) -> list[Value]:
    """Return mean, 1 / standard deviation, biased and unbiased variance, each [channels]."""
    channels = value.meta.shape[1]
    dtype = value.meta.dtype if weight is None else weight.meta.dtype
    if dtype in (torch.float16, torch.bfloat16):  # torch's kernels accumulate in float32 too
        dtype = torch.float32
    moments = _moments(dtype)
    ranks = recording.ranks
    if ranks is not None and ranks.normalises:
        return ranks.statistics(recording, Operand(value, shard), moments, (channels, dtype), eps)

    def finish(mean: Tensor, squares: Tensor, count: int) -> list[Tensor]:
        var = squares / count
        return [mean, (var + eps).rsqrt(), var, squares / max(count - 1, 1)]

    meta = meta_tensor((channels,), (1,), dtype)
    strategy = OpStrategy([Operand(value, shard)], [PARTIAL] * 4, moments, lambda: Moments(finish))
    return recording.add("batch_norm", strategy, [meta] * 4, compilable=True)


@lru_cache(maxsize=1 << 10)
def _moments(dtype: torch.dtype) -> Run:
    def moments(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        x = tensors[0].to(dtype)
        count = x.numel() // max(x.shape[1], 1)
        mean = _by_channel(x) / count
        squares = _by_channel((x - mean.view(1, x.shape[1], *[1] * (x.dim() - 2))).square_())
        return (mean, squares, count), None, None, None

    return moments


def _like(affine: Tensor | None, statistic: Tensor) -> Tensor | None:
    """Return weight or bias in the dtype of the statistics, which the kernel requires."""
    if affine is None or affine.dtype is statistic.dtype:
        return affine
    return affine.to(statistic.dtype)


def _by_channel(x: Tensor) -> Tensor:
    # Two sums, over positions first, are several times as fast on a CPU as one sum or `torch.var_mean`.
    return (x.flatten(2).sum(2) if x.dim() > 2 else x).sum(0)


def _update(recording: Recorder, buffer: Tensor, value: Value, momentum: float) -> None:
    """Record the update of a running statistic, as one operation in place of four."""
    old, dtype = recording.from_real(buffer), buffer.dtype

    def moved(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
        old, new = tensors
        # In the dtype of the buffer, which may be narrower than that of the statistics.
        return (1 - momentum) * old + momentum * new.to(dtype)

    strategy = OpStrategy([Operand(old, REPLICATE), Operand(value, REPLICATE)], [PARTIAL], moved)
    # Written later, because the statistic is not computed yet and the forward must not start a sweep.
    recording.write_later(buffer, recording.add("batch_norm running statistic", strategy, old.meta))


def backward(
    recording: Recorder,
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    training: bool,
    eps: float,
    mask: list[bool],
) -> Any:
    """`native_batch_norm_backward`: (dx, d weight, d bias)."""
    value, gradient = recording.value(x), recording.value(grad)
    shard = _shard_of(value) or _shard_of(gradient)  # a full input may have a sharded gradient
    w = _optional_value(recording, weight)
    if shard is None and recording.ranks is not None:
        shard = recording.ranks.shard_in_backward(recording, value, recording.value(save_mean))
    if shard is None or (w is not None and w.shard is not None):
        return _samples_in_channels_backward(
            recording,
            grad,
            x,
            (weight, running_mean, running_var, save_mean, save_invstd, training, eps, mask),
        )
    inputs = [Operand(gradient, shard), Operand(value, shard)]
    channel = meta_tensor((value.meta.shape[1],), (1,), (w or value).meta.dtype)
    if not training:
        operands, positions = _optional_operands(
            [w, _optional_value(recording, running_mean), _optional_value(recording, running_var)]
        )

        def frozen(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            scale, mean, var = _picked(tensors, positions, 2)
            dy, x = tensors[:2]
            # The kernel of CUDA requires tensors, empty ones in eval mode; that of the CPU ignores them.
            empty = x.new_empty(0)
            return _backward_kernel(dy, x, scale, mean, var, empty, empty, False, eps, mask)

        strategy = OpStrategy([*inputs, *operands], [shard, PARTIAL, PARTIAL], frozen)
        metas = [
            meta if wanted else None
            for meta, wanted in zip([value.meta, channel, channel], mask, strict=True)
        ]
        return recording.wrapped(recording.add("batch_norm backward", strategy, metas))
    mean, invstd = recording.value(save_mean), recording.value(save_invstd)
    operands, positions = _optional_operands([w, mean, invstd])
    strategy = OpStrategy([*inputs, *operands], [PARTIAL, PARTIAL], _sums(tuple(positions), eps))
    d_weight, d_bias = recording.add("batch_norm sums", strategy, [mean.meta] * 2, compilable=True)
    dx = _input_gradient(recording, inputs, w, [mean, invstd, d_weight, d_bias], shard) if mask[0] else None
    results = recording.wrapped([dx, d_weight if mask[1] else None, d_bias if mask[2] else None])
    # For 16-bit parameters the sums are float32, and are rounded once, after the reduction.
    return [results[0], *(None if one is None else one.to(channel.dtype) for one in results[1:])]


@lru_cache(maxsize=1 << 10)
def _sums(positions: tuple[int | None, ...], eps: float) -> Run:
    def sums(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        scale, mean, invstd = _picked(tensors, positions, 2)
        dy, x = tensors[:2]
        # Without a weight the kernel of CUDA returns no sums. They do not depend on its values.
        weight = torch.ones_like(mean) if scale is None else _like(scale, mean)
        # Without dx, for which the kernel would use the sums of the micro-batch.
        return _backward_kernel(dy, x, weight, None, None, mean, invstd, True, eps, [False, True, True])[1:]

    return sums


def _input_gradient(
    recording: Recorder, inputs: list[Operand], weight: Value | None, full: list[Value], shard: Shard
) -> Value:
    value = inputs[1].value
    count = value.meta.numel() // max(value.meta.shape[1], 1)
    # dx needs the sums over ranks. Parameter gradients are those of this rank.
    if recording.ranks is not None:
        full = [*full[:2], *recording.ranks.sum_backward(recording, full[0], full[2:], count)]

    meta, x = full[0].meta, value.meta
    shape = (1, len(meta), *[1] * (x.dim() - 2))
    dtype = x.dtype if x.dtype.itemsize >= meta.dtype.itemsize else meta.dtype

    def coefficients(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        # dx = a * dy + b * x + c with one number per channel, which takes two fused operations per
        # micro-batch.
        mean, invstd, d_weight, d_bias, *scale = tensors
        a = invstd * scale[0] if scale else invstd
        b = -a * invstd * d_weight / count
        c = -a * d_bias / count - b * mean
        return [one.to(dtype).view(shape) for one in (a, b, c)]  # reshaped once for all micro-batches

    operands = [Operand(v, REPLICATE) for v in [*full, *([] if weight is None else [weight])]]
    metas = [meta_tensor(shape, (len(meta), *[1] * (x.dim() - 1)), dtype)] * 3
    a, b, c = recording.add(
        "batch_norm coefficients", OpStrategy(operands, [PARTIAL] * 3, coefficients), metas
    )
    strategy = OpStrategy(
        [*inputs, *(Operand(v, REPLICATE) for v in (a, b, c))], [shard], _gradient, light=True
    )
    return recording.add("batch_norm input", strategy, value.meta, compilable=True)


def _gradient(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
    dy, x, a, b, c = tensors
    return torch.addcmul(c, x, b).addcmul_(dy, a).to(dy.dtype)


# -- samples in another dimension: among the channels (InstanceNorm), or elsewhere --------------------------


def _samples_in_channels(recording: Recorder, x: Any, rest: tuple[Any, ...]) -> Any:
    weight, bias, running_mean, _, training, _, eps = rest
    # InstanceNorm calls batch_norm on [1, N * C, ...], with the samples in dimension 1.
    value = recording.value(x)
    channels = [_optional_value(recording, t) for t in (weight, bias)]
    shard = value.shard
    if running_mean is not None and training:  # running statistics couple the samples of an InstanceNorm
        return _on_full_tensor(recording, x, rest)
    if shard is None or shard.dim != 1 or not training:
        return NotImplemented
    positions: list[int | None] = []
    operands = [Operand(value, shard)]
    for item in channels:
        positions.append(None if item is None else len(operands))
        if item is not None:
            operands.append(Operand(item, shard.at(0)))

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        w, b = _picked(tensors, positions, 0)
        return _kernel(tensors[0], w, b, None, None, True, 0.0, eps)

    stat = meta_tensor((value.meta.shape[1],), (1,), value.meta.dtype)
    strategy = OpStrategy(operands, [shard, shard.at(0), shard.at(0)], run)
    return recording.wrapped(recording.add("instance_norm", strategy, [value.meta, stat, stat]))


def _on_full_tensor(recording: Recorder, x: Any, rest: tuple[Any, ...]) -> Any:
    """Run the functional form on the full tensor, which returns the running statistics."""
    out, mean, invstd, new_mean, new_var = aten._native_batch_norm_legit_functional(x, *rest)
    recording.write_later(rest[2], recording.value(new_mean))
    recording.write_later(rest[3], recording.value(new_var))
    return out, mean, invstd


def _samples_in_channels_backward(recording: Recorder, grad: Any, x: Any, rest: tuple[Any, ...]) -> Any:
    weight, running_mean, _, save_mean, save_invstd, training, eps, mask = rest
    value, gradient = recording.value(x), recording.value(grad)
    shard = value.shard or gradient.shard
    if shard is None or shard.dim != 1 or not training or running_mean is not None:
        return NotImplemented
    operands = [Operand(gradient, shard), Operand(value, shard)]
    operands += [Operand(recording.value(t), shard.at(0)) for t in (save_mean, save_invstd)]
    if weight is not None:
        operands.append(Operand(recording.value(weight), shard.at(0)))

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        dy, x, mean, invstd, *w = tensors
        return _backward_kernel(dy, x, w[0] if w else None, None, None, mean, invstd, True, eps, mask)

    channel = meta_tensor((value.meta.shape[1],), (1,), value.meta.dtype)
    metas = [
        meta if wanted else None for meta, wanted in zip([value.meta, channel, channel], mask, strict=True)
    ]
    outputs = [shard, shard.at(0), shard.at(0)]
    return recording.wrapped(
        recording.add("instance_norm backward", OpStrategy(operands, outputs, run), metas)
    )


# -- CUDA ---------------------------------------------------------------------------------------------------


def cudnn_forward(
    recording: Recorder,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """`cudnn_batch_norm`: `forward`, with an empty reserve, which `cudnn_backward` does not read."""
    result = forward(recording, x, weight, bias, mean, var, training, momentum, eps)
    if result is NotImplemented:
        return result
    return (*result, torch.empty(0, dtype=torch.uint8, device=x.device))


def cudnn_backward(
    recording: Recorder,
    x: Any,
    grad: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_var: Any,
    eps: float,
    reserve: Any,
) -> Any:
    """`cudnn_batch_norm_backward`, which is only called in training."""
    return backward(
        recording,
        grad,
        x,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_var,
        True,
        eps,
        [True, True, True],
    )
