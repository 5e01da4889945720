# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Terms of a model's compiled losses, in place of their total."""

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
    """A `CompileLoss` that finds the targets, predictions and weights of each loss, and notes its term.

    Which part of nested targets belongs to which loss is Keras' own code; only the losses themselves are
    replaced. It makes no metrics: these are updated once for the batch.
    """

    def __init__(self, compiled: Any, stated: Any, rows: Any, plan: Plan | None) -> None:
        super().__init__(compiled._user_loss, compiled._user_loss_weights, output_names=compiled.output_names)
        self.stated, self.rows, self.plan = stated, rows, plan
        self.terms: list[Term] = []
        self._y_pred_build_structure = compiled._y_pred_build_structure
        self._y_true_build_structure = compiled._y_true_build_structure
        self._flat_losses = [
            CompileLoss.Loss(flat.path, self._noting(flat), None, flat.name) for flat in compiled._flat_losses
        ]
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        """None for each loss: no metric to update."""
        return [None] * len(self._flat_losses)

    def free(self) -> None:
        """Drop the losses: they hold the taker, and with it the terms and their graph."""
        self._flat_losses = []

    def _noting(self, flat: Any) -> Any:
        def note(y: Any, y_pred: Any, sample_weight: Any) -> Any:
            plan, number = self.plan, len(self.terms)
            if plan is not None and plan.may_be_empty_beside_others(number):
                y_pred = without_gradient_of_nothing(y_pred, self.stated)
            given = (flat.loss, y, y_pred, sample_weight, self.stated, self.rows)
            term = term_of(flat.name, *given, looking=plan is None)
            if plan is not None and term.numbers is not None:
                rowwise.check_like(flat.name, term.numbers, plan.numbers[number])
            factor = 1.0 if flat.loss_weights is None else flat.loss_weights
            self.terms.append(term.times(factor))
            return term.value

        return note


def take(
    compiled: Any, y: Any, y_pred: Any, sample_weight: Any, stated: Any, rows: Any, plan: Plan | None
) -> list[Term]:
    """Return the terms of the compiled losses of a micro-batch, in the order Keras has them."""
    taker = Taker(compiled, stated, rows, plan)
    taker(y, y_pred, sample_weight)
    taker.free()
    return taker.terms


def without_gradient_of_nothing(y_pred: Any, weight: Any) -> Any:
    """Return predictions that a loss of weight 0 gives no gradient.

    The total leaves such a loss, 0 / 0, out: the gradient by its value is 0. That by the predictions is then
    0 x NaN, and would be added to the gradients of other terms. Here it is replaced, not multiplied.
    """

    def cut(leaf: Any) -> Any:
        if not backend.is_float_dtype(backend.standardize_dtype(leaf.dtype)):
            return leaf
        found = ops.where(weight == 0, ops.stop_gradient(leaf), leaf)
        mask = backend.get_keras_mask(leaf)
        if mask is not None:
            backend.set_keras_mask(found, mask)
        return found

    return keras.tree.map_structure(cut, y_pred)
