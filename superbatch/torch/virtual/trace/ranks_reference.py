"""BatchNorm over ranks, computed by its definition on full tensors: a reference for paranoid mode.

The sums are collectives of the block, so every rank must be in paranoid mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superbatch.torch.devices import in_float64

from ..ir.recorder import RankSums, Recorder
from ..ir.references import Arguments
from ..ir.values import Value


def forward(recording: Recorder, ranks: RankSums, mean: Value, arguments: Arguments) -> list[Tensor]:
    """Return the output, mean, 1 / standard deviation and the updated running statistics.

    `mean`, to be compared, identifies the ranks; `arguments` are full tensors from before the operation.
    """
    x = in_float64(arguments["input"])
    # One flat tensor includes the count, because ranks may have different numbers of samples.
    *sums, count = _over(recording, ranks, mean, [*_by_channel(x), _count(x)])
    average = torch.stack(sums) / count
    # Deviations from the mean of all ranks, to check the combination of moments by a second method.
    squares = _by_channel((x - _as_channels(average, x)).square())
    (total,) = _over(recording, ranks, mean, squares, split=False)
    invstd = (total / count + arguments["eps"]).rsqrt()
    output = (x - _as_channels(average, x)) * _as_channels(invstd, x)
    weight, bias = arguments["weight"], arguments["bias"]
    output = output if weight is None else output * _as_channels(weight, x)
    output = output if bias is None else output + _as_channels(bias, x)
    running = [
        (1 - arguments["momentum"]) * arguments[name] + arguments["momentum"] * now
        for name, now in (
            ("running_mean", average),
            ("running_var", total / (count - 1).clamp(min=1)),
        )
        if arguments[name] is not None
    ]
    return [output, average, invstd, *running]


def backward(
    recording: Recorder, ranks: RankSums, mean: Value, arguments: Arguments, *, mask: Any
) -> list[Any]:
    """Return the gradients of input, weight and bias that `mask` asks for.

    `mean` is that of the forward, and identifies the ranks. The name of the gradient begins with "grad".
    """
    x = in_float64(arguments["input"])
    grad = in_float64(next(value for name, value in arguments.items() if name.startswith("grad")))
    average, invstd = (
        _as_channels(arguments[name], x)
        for name in ("save_mean", "save_invstd" if "save_invstd" in arguments else "save_var")
    )
    hat = (x - average) * invstd
    d_weight, d_bias = _by_channel(grad * hat), _by_channel(grad)
    if not mask[0]:  # parameter gradients are those of this rank, without a collective
        return [None, d_weight, d_bias]
    *sums, count = _over(recording, ranks, mean, [*d_weight, *d_bias, _count(x)])
    all_weight, all_bias = (_as_channels(half / count, x) for half in torch.stack(sums).chunk(2))
    # The formula of `trace.batch_norm`, with the sums and the count of all ranks.
    dx = invstd * (grad - all_bias - hat * all_weight)
    weight = arguments["weight"]
    return [dx if weight is None else dx * _as_channels(weight, x), d_weight, d_bias]


def _over(
    recording: Recorder, ranks: RankSums, mean: Value, mine: Any, *, split: bool = True
) -> list[Tensor]:
    # `sum_over_ranks` records a collective, so that all ranks issue it in the same order.
    flat = torch.stack(mine) if split else mine
    (total,) = recording.materialized([ranks.sum_over_ranks(recording, mean, recording.from_real(flat))])
    return list(total) if split else [total]


def _by_channel(x: Tensor) -> Tensor:
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


def _count(x: Tensor) -> Tensor:
    return x.new_tensor(x.numel() // max(x.shape[1], 1))


def _as_channels(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view([1, -1] + [1] * (x.dim() - 2))
