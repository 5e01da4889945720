"""BatchNorm over ranks by its definition, on full tensors: the reference of paranoid mode.

The sums are collectives of the block, so every rank has to be in paranoid mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superbatch.torch.devices import in_float64

from ..ir.recorder import RankSums, Recorder
from ..ir.references import Given
from ..ir.values import Value


def forward(recording: Recorder, across: RankSums, mean: Value, given: Given) -> list[Tensor]:
    """Return the output, mean, 1 / standard deviation and the updated running statistics.

    Args:
        recording: recording of the block.
        across: sums over the ranks.
        mean: the mean to compare with; it identifies the ranks.
        given: arguments by name, with full tensors from before the operation.
    """
    x = in_float64(given["input"])
    # The count goes along in one flat tensor: ranks may have different numbers of samples.
    *sums, count = _over(recording, across, mean, [*_by_channel(x), _count(x)])
    average = torch.stack(sums) / count
    # Two passes, deviations from the mean of all ranks: a second method beside the combination of moments.
    squares = _by_channel((x - _as_channels(average, x)).square())
    (total,) = _over(recording, across, mean, squares, split=False)
    invstd = (total / count + given["eps"]).rsqrt()
    found = (x - _as_channels(average, x)) * _as_channels(invstd, x)
    weight, bias = given["weight"], given["bias"]
    found = found if weight is None else found * _as_channels(weight, x)
    found = found if bias is None else found + _as_channels(bias, x)
    running = [
        (1 - given["momentum"]) * given[name] + given["momentum"] * now
        for name, now in (
            ("running_mean", average),
            ("running_var", total / (count - 1).clamp(min=1)),
        )
        if given[name] is not None
    ]
    return [found, average, invstd, *running]


def backward(recording: Recorder, across: RankSums, mean: Value, given: Given, *, mask: Any) -> list[Any]:
    """Return the gradients of input, weight and bias.

    Args:
        recording: recording of the block.
        across: sums over the ranks.
        mean: mean that the layer normalised with.
        given: as in `forward`; the gradient is the argument whose name begins with "grad".
        mask: flags of the gradients that are needed.
    """
    x = in_float64(given["input"])
    grad = in_float64(next(value for name, value in given.items() if name.startswith("grad")))
    average, invstd = (
        _as_channels(given[name], x)
        for name in ("save_mean", "save_invstd" if "save_invstd" in given else "save_var")
    )
    hat = (x - average) * invstd
    d_weight, d_bias = _by_channel(grad * hat), _by_channel(grad)
    if not mask[0]:  # parameter gradients are those of this rank, and no rank issues a collective
        return [None, d_weight, d_bias]
    *sums, count = _over(recording, across, mean, [*d_weight, *d_bias, _count(x)])
    all_weight, all_bias = (_as_channels(half / count, x) for half in torch.stack(sums).chunk(2))
    # The formula of `trace.batch_norm`, with the sums and the count of all ranks.
    dx = invstd * (grad - all_bias - hat * all_weight)
    weight = given["weight"]
    return [dx if weight is None else dx * _as_channels(weight, x), d_weight, d_bias]


def _over(
    recording: Recorder, across: RankSums, mean: Value, mine: Any, *, split: bool = True
) -> list[Tensor]:
    # `summed` is a recorded collective, so its place in the order is the same on every rank.
    flat = torch.stack(mine) if split else mine
    (found,) = recording.materialized([across.summed(recording, mean, recording.given(flat))])
    return list(found) if split else [found]


def _by_channel(x: Tensor) -> Tensor:
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


def _count(x: Tensor) -> Tensor:
    return x.new_tensor(x.numel() // max(x.shape[1], 1))


def _as_channels(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view([1, -1] + [1] * (x.dim() - 2))
