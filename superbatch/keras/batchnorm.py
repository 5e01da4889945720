# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Moving statistics of BatchNormalization, updated once per update instead of once per micro-batch.

The forward of a micro-batch moves the statistics of a layer from ``s`` to ``m s + (1 - m) b_i``, with the
momentum ``m``. The statistics ``b_i`` of the micro-batch are computed from these two values, and the layer is
reset to ``s``. The mean over all rows is the mean of the ``b_i``, weighted by rows. The variance over all
rows is the variance within micro-batches plus the variance between them.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from . import arithmetic, refusals

Sums = list[Any]


class Statistics:
    """The statistics of a model's BatchNormalization layers at the start of an update."""

    def __init__(self, model: Any) -> None:
        # A momentum of 1 keeps the statistics as they are, and `_own` could not divide by 1 - 1.
        self.layers = [layer for layer in refusals.batchnorms(model) if layer.momentum < 1]
        self.start = [(ops.copy(layer.moving_mean), ops.copy(layer.moving_variance)) for layer in self.layers]

    def zeros(self) -> Sums:
        """Return sums of 0 for each layer: rows, means weighted by rows, squares weighted by rows."""
        return [
            zero
            for mean, _ in self.start
            for zero in (ops.zeros((), mean.dtype), ops.zeros_like(mean), ops.zeros_like(mean))
        ]

    def added(self, sums: Sums, rows: Any) -> Sums:
        """Return the sums plus the statistics of the last micro-batch; reset the layers to the start."""
        totals: Sums = []
        for number, (layer, (mean, variance)) in enumerate(zip(self.layers, self.start, strict=True)):
            count, means, squares = sums[3 * number : 3 * number + 3]
            own = _own(layer.moving_mean, mean, layer.momentum)
            spread = _own(layer.moving_variance, variance, layer.momentum)
            weight = ops.cast(rows, count.dtype)
            totals += [
                count + weight,
                means + arithmetic.taking_part(own, weight) * weight,
                squares + arithmetic.taking_part(spread + own**2, weight) * weight,
            ]
            layer.moving_mean.assign(mean)
            layer.moving_variance.assign(variance)
        return totals

    def assign(self, sums: Sums) -> None:
        """Set the moving statistics of the layers to one step of the average over the whole batch."""
        for number, (layer, (mean, variance)) in enumerate(zip(self.layers, self.start, strict=True)):
            count, means, squares = sums[3 * number : 3 * number + 3]
            own = arithmetic.per_weight(means, count)
            spread = arithmetic.per_weight(squares, count) - own**2
            momentum = ops.where(count > 0, layer.momentum, 1.0)  # no row took part: change nothing
            momentum = ops.cast(momentum, mean.dtype)
            layer.moving_mean.assign(mean * momentum + own * (1 - momentum))
            layer.moving_variance.assign(variance * momentum + spread * (1 - momentum))


def _own(after: Any, before: Any, momentum: float) -> Any:
    """Return the value ``b`` of one step of a moving average, ``after = m before + (1 - m) b``."""
    return (ops.convert_to_tensor(after) - before * momentum) / (1.0 - momentum)
