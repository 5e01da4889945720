# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Result of one window, as tensors that a `tf.function` can return."""

from __future__ import annotations

from typing import Any, NamedTuple


class Applied(NamedTuple):
    """Result of `Accumulator.apply`; scalar tensors.

    Attributes:
        made: bool: whether an update was made. False if ``weight`` is 0, or if the gradient is not finite (a
            LossScaleOptimizer is called then too, and skips the update).
        weight: float64: ``W``, the total weight of the micro-batches that took part, over all replicas.
        loss: float64: the loss of the batch; NaN unless every call of ``add`` had ``loss=``.
        grad_norm: float64: 2-norm of the batch's gradient before clipping, without a loss scale.
        microbatches: int64: number of calls of ``add``, over all replicas.
        dropped: int64: number of micro-batches left out as not finite (``nonfinite="skip_microbatch"``).
        a2: float64: ``sum (w_i / W)^2 |g_i|^2``, see `superbatch.noise`; None without ``noise=True``.
        b2: float64: ``|g|^2`` of the batch's gradient.
        q: float64: ``sum (w_i / W)^2``.
        effective_samples: float64: ``1 / sum((w_i / W)^2 / n_i)``.
    """

    made: Any
    weight: Any
    loss: Any
    grad_norm: Any
    microbatches: Any
    dropped: Any
    a2: Any = None
    b2: Any = None
    q: Any = None
    effective_samples: Any = None
