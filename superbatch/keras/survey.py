# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Terms of a model's loss, found by a forward that changes no state."""

from __future__ import annotations

from typing import Any

import keras
from keras.src import backend

from . import forward, window
from .options import Options
from .terms import Term
from .window import Plan

PLANS = "_superbatch_plans"


def plan(model: Any, batch: Any, options: Options, *, symbolic: bool) -> Plan:
    """Return the plan for batches of this form, which is made once, from one forward.

    Args:
        model: the model.
        batch: its ``(x, y, sample_weight)``.
        options: of `accumulate`.
        symbolic: whether the forward is without numbers.
    """
    known = vars(model).setdefault(PLANS, {})
    key = str(keras.tree.map_structure(_form, batch))
    compiled = (model._compile_loss, model.optimizer)
    if key not in known or known[key][0] != compiled:
        known[key] = compiled, (_symbolically if symbolic else _really)(model, batch, options)
    return known[key][1]


def _form(leaf: Any) -> Any:
    return None if leaf is None else (tuple(leaf.shape[1:]), str(leaf.dtype))


def _symbolically(model: Any, batch: Any, options: Options) -> Plan:
    found: list[Plan] = []

    def symbolic(*batch: Any) -> Any:
        with scope(model):
            found.append(look(model, batch, options))
        return batch[0]

    specs = keras.tree.map_structure(
        lambda leaf: (
            None if leaf is None else keras.KerasTensor(leaf.shape, backend.standardize_dtype(leaf.dtype))
        ),
        batch,
    )
    backend.compute_output_spec(symbolic, *specs)
    return found[0]


def _really(model: Any, batch: Any, options: Options) -> Plan:
    with scope(model):
        return look(model, batch, options)


def scope(model: Any) -> Any:
    """A scope in which a forward leaves no trace; regularizers see the weights that there are."""
    mapping = [(weight, weight.value) for weight in model.trainable_variables]
    return keras.StatelessScope(state_mapping=mapping, collect_losses=True)


def look(model: Any, batch: Any, options: Options) -> Plan:
    """Return the plan by a forward of a batch, in a scope in which nothing is changed."""
    terms = forward.terms_of(model, batch, forward.predictions(model, batch[0]), options, None)
    return plan_of(model, terms, options)


def plan_of(model: Any, terms: list[Term], options: Options) -> Plan:
    """Return the plan for terms of a model's loss."""
    scaled = hasattr(model.optimizer, "inner_optimizer") or bool(model.optimizer.loss_scale_factor)
    return window.plan_of(terms, options, scaled=scaled)
