# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Moving statistics of BatchNormalization: one step of the average for each update, not each micro-batch.

Every micro-batch starts from the moving statistics ``s`` at the start of the update, and ends with
``m s + (1 - m) b_i``. Its own statistics ``b_i`` follow from that. Mean and variance over all rows follow
from the ``b_i``: the variance within micro-batches plus that between them.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from . import arithmetic, refusals

Sums = list[Any]


class Statistics:
    """The statistics of a model's BatchNormalization layers at the start of an update."""

    def __init__(self, model: Any) -> None:
        self.layers = [layer for layer in refusals.batchnorms(model) if layer.momentum < 1]
        self.start = [(ops.copy(layer.moving_mean), ops.copy(layer.moving_variance)) for layer in self.layers]

    def zeros(self) -> Sums:
        """Sums before the first micro-batch: rows, means and squares of each layer."""
        return [
            zero
            for mean, _ in self.start
            for zero in (ops.zeros((), mean.dtype), ops.zeros_like(mean), ops.zeros_like(mean))
        ]

    def noted(self, sums: Sums, rows: Any) -> Sums:
        """Add the statistics of the last micro-batch to the sums, and reset the layers to the start."""
        found: Sums = []
        for number, (layer, (mean, variance)) in enumerate(zip(self.layers, self.start, strict=True)):
            count, means, squares = sums[3 * number : 3 * number + 3]
            own = _own(layer.moving_mean, mean, layer.momentum)
            spread = _own(layer.moving_variance, variance, layer.momentum)
            weight = ops.cast(rows, count.dtype)
            found += [
                count + weight,
                means + arithmetic.taking_part(own, weight) * weight,
                squares + arithmetic.taking_part(spread + own**2, weight) * weight,
            ]
            layer.moving_mean.assign(mean)
            layer.moving_variance.assign(variance)
        return found

    def assign(self, sums: Sums) -> None:
        """Set the layers to their statistics after the update."""
        for number, (layer, (mean, variance)) in enumerate(zip(self.layers, self.start, strict=True)):
            count, means, squares = sums[3 * number : 3 * number + 3]
            own = arithmetic.per_weight(means, count)
            spread = arithmetic.per_weight(squares, count) - own**2
            kept = ops.where(count > 0, layer.momentum, 1.0)
            kept = ops.cast(kept, mean.dtype)
            layer.moving_mean.assign(mean * kept + own * (1 - kept))
            layer.moving_variance.assign(variance * kept + spread * (1 - kept))


def _own(after: Any, before: Any, momentum: float) -> Any:
    """Return the value that one step of a moving average has mixed in."""
    return (ops.convert_to_tensor(after) - before * momentum) / (1.0 - momentum)
