# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Updates of the model's metrics: compiled metrics per micro-batch, the losses once per batch."""

from __future__ import annotations

from typing import Any

from keras import ops

from . import window
from .window import Plan


def update_metrics(model: Any, microbatch: Any, y_pred: Any) -> None:
    """Update the compiled metrics with a micro-batch; exact for metrics that are sums over samples."""
    x, y, sample_weight = microbatch
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def track_loss(model: Any, sums: Any, plan: Plan, rows: Any, regularization: Any | None) -> None:
    """Update the metrics of the total loss and of each loss, weighted by the rows of the batch.

    A batch of weight 0 has no loss, and counts as 0 rows.
    """
    if plan.may_be_empty:
        rows = ops.where(window.counts(sums, plan), rows, ops.zeros_like(rows))
    losses = window.losses_of(sums, plan)
    model._loss_tracker.update_state(
        window.total_loss(losses, plan, regularization), sample_weight=ops.cast(rows, plan.dtype)
    )
    if model._compile_loss is not None:
        for metric, loss in zip(model._compile_loss.metrics, losses, strict=False):
            metric.update_state(loss, sample_weight=ops.cast(rows, plan.dtype))
