# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Terms of a model's compiled losses: one for each loss, where Keras computes only the total."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from keras.src import backend
from keras.src.trainers.compile_utils import CompileLoss

from . import rowwise
from .terms import Term, term_of
from .window import Plan


class Taker(CompileLoss):
    """A `CompileLoss` that collects a term for each loss when it is called.

    Keras' own code matches losses with parts of nested targets; only the losses themselves are replaced. The
    metrics of losses are left out: they are updated once for the batch.

    Args:
        compiled: the `CompileLoss` of the model.
        stated: the weight of the micro-batch by `loss_weight=`, or None.
        rows: the rows of the micro-batch, a scalar tensor.
        plan: the plan for batches of this form; None while it is being made.
    """

    def __init__(self, compiled: Any, stated: Any, rows: Any, plan: Plan | None) -> None:
        super().__init__(compiled._user_loss, compiled._user_loss_weights, output_names=compiled.output_names)
        self.stated, self.rows, self.plan = stated, rows, plan
        self.terms: list[Term] = []
        self._y_pred_build_structure = compiled._y_pred_build_structure
        self._y_true_build_structure = compiled._y_true_build_structure
        self._flat_losses = [
            CompileLoss.Loss(flat.path, self._collecting(flat), None, flat.name)
            for flat in compiled._flat_losses
        ]
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        """None for each loss: Keras then updates no metric."""
        return [None] * len(self._flat_losses)

    def free(self) -> None:
        """Drop the losses. They refer to this object, and a cycle would keep the graph of the terms alive."""
        self._flat_losses = []

    def _collecting(self, flat: Any) -> Any:
        """Return a loss that computes the term of a compiled loss, appends it and returns its value."""

        def collect(y: Any, y_pred: Any, sample_weight: Any) -> Any:
            plan, number = self.plan, len(self.terms)
            if plan is not None and plan.may_be_empty_beside_others(number):
                y_pred = without_gradient_of_nothing(y_pred, self.stated)
            given = (flat.loss, y, y_pred, sample_weight, self.stated, self.rows)
            term = term_of(flat.name, *given, inspecting=plan is None)
            if plan is not None and term.numbers is not None:
                rowwise.check_like(flat.name, term.numbers, plan.numbers[number])
            factor = 1.0 if flat.loss_weights is None else flat.loss_weights
            self.terms.append(term.times(factor))
            return term.value

        return collect


def take(
    compiled: Any, y: Any, y_pred: Any, sample_weight: Any, stated: Any, rows: Any, plan: Plan | None
) -> list[Term]:
    """Return the terms of the compiled losses of a micro-batch, in Keras' order."""
    taker = Taker(compiled, stated, rows, plan)
    taker(y, y_pred, sample_weight)
    taker.free()
    return taker.terms


def without_gradient_of_nothing(y_pred: Any, weight: Any) -> Any:
    """Return predictions through which no gradient flows back if the weight is 0.

    A loss of weight 0 is 0 / 0, and the total leaves it out by a factor of 0. In the backward this factor
    would multiply the NaN derivative of the loss, and 0 x NaN would be added to the gradients of other terms.
    """

    def cut(leaf: Any) -> Any:
        if not backend.is_float_dtype(backend.standardize_dtype(leaf.dtype)):
            return leaf
        guarded = ops.where(weight == 0, ops.stop_gradient(leaf), leaf)
        mask = backend.get_keras_mask(leaf)  # an attribute of the tensor, which a new tensor lacks
        if mask is not None:
            backend.set_keras_mask(guarded, mask)
        return guarded

    return keras.tree.map_structure(cut, y_pred)
